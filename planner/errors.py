"""The planner's error."""


class PlanError(ValueError):
    """Input from which no fleet can be planned; `fix` says what to change."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix
