"""A LoRA adapter on one real engine: base and adapter requests go right."""

from collections.abc import Iterator

import httpx

from bench.common.report import Row, equals
from bench.real_engine.engines import ADAPTER, BASE, RealEngine, completion, gateway

TEXTS = tuple(f"question {number}: what is {number} times seven?" for number in range(8))


def scene(having: RealEngine, lacking: RealEngine) -> Iterator[Row]:
    """Asks both names, directly and through a gateway before both engines."""
    wanted = {
        (name, text): _text(having.ask(name, text)) for name in (BASE, ADAPTER) for text in TEXTS
    }
    differ = sum(wanted[BASE, text] != wanted[ADAPTER, text] for text in TEXTS)
    yield equals("prompts that base and adapter answer differently", differ, len(TEXTS))
    pool = {"max_model_len": having.window, "max_num_seqs": having.slots}
    workers = [having.url, lacking.url]
    model = {"name": BASE, "discover_loras": True, "pools": {"all": {**pool, "workers": workers}}}
    with gateway({"models": [model], "health": {"interval_s": 0.5}}) as url:
        cards = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        parents = {card["id"]: card.get("parent") for card in cards}
        yield equals("the adapter is listed with its base", parents.get(ADAPTER) == BASE, True)
        for name in (BASE, ADAPTER):
            found = [completion(url, name, text) for text in TEXTS]
            right = sum(_text(a) == wanted[name, t] for a, t in zip(found, TEXTS, strict=True))
            yield equals(f"right answers through the gateway, {name}", right, len(TEXTS))
            told = sum(answer.get("model") == name for answer in found)
            yield equals(f"answers under their own name, {name}", told, len(TEXTS))
            if name == ADAPTER:
                there = sum(answer["worker"] == having.id for answer in found)
                yield equals("adapter requests at the engine that has it", there, len(TEXTS))
        body = {"lora_name": ADAPTER}
        httpx.post(f"{having.url}/v1/unload_lora_adapter", json=body, trust_env=False)
        first = completion(url, ADAPTER, TEXTS[0])["status"]
        later = completion(url, ADAPTER, TEXTS[0])["status"]
        yield equals("unloaded: 503 while it is noticed, then 404", first * 1000 + later, 503_404)


def _text(answer: dict[str, object]) -> object:
    choices = answer.get("choices")
    return choices[0]["text"] if isinstance(choices, list) else answer.get("error")
