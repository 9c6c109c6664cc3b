"""What is wrong with a question, and what to change."""


class PlanError(ValueError):
    """Input that no fleet can be planned from; `fix` says what to change."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix
