"""Check that a question can be answered."""

from planner.errors import PlanError
from planner.goals import check_goals
from planner.records import Question
from planner.workload.moments import boundaries_of


def checked_boundaries(question: Question) -> tuple[int, ...]:
    """The boundaries to plan with; raises PlanError for an inconsistent question."""
    window, workload = question.window, question.workload
    if workload.longest_tokens > window:
        raise PlanError(
            f"requests of up to {workload.longest_tokens} tokens exceed the window of {window}",
            f"raise --max-model-len to {workload.longest_tokens} or more",
        )
    for node in (*question.nodes, question.short_node, question.long_node):
        if node is None:
            continue
        check_goals(node, question.goals)
        if node.window_slots(window) < 1 and node is not question.short_node:
            raise PlanError(
                f"{node.name} holds {node.kv_tokens} tokens of KV cache, less than one window of "
                f"{window}",
                "use more GPUs per node, a larger GPU, or a smaller --max-model-len",
            )
    if len(question.b_short) > 1 and (question.mode == "paper" or (question.gamma or 1) > 1):
        raise PlanError(
            "more than one boundary with mode paper or with gamma above 1",
            "give one boundary: the paper, and compression, are about two pools",
        )
    if not 0 <= question.p_c <= 1:
        raise PlanError(f"p_c is {question.p_c:g}", "give a share from 0 to 1")
    if question.gamma is not None and question.gamma < 1:
        raise PlanError(f"gamma is {question.gamma:g}", "give 1 (no compression) or more")
    if (question.gamma or 1) > 1 and question.compressible is None:
        raise PlanError(
            f"gamma {question.gamma:g} compresses, and p_c, the share of prompts that can be, is "
            "not known",
            "give --pc, the log of a gateway that compresses, or --gamma 1",
        )
    for b_short in question.b_short:
        if not 0 < workload.share(b_short) < 1:
            raise PlanError(
                f"no request lies on one side of a boundary at {b_short} tokens",
                f"choose one below the longest request ({workload.longest_tokens})",
            )
    if list(question.b_short) != sorted(set(question.b_short)):
        raise PlanError("boundaries are not ascending", "sort --b-short, shortest first")
    return question.b_short or boundaries_of(workload, window)
