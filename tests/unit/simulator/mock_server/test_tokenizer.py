"""The mock engine's tokenizer: bytes per token by kind, and what holds for any text.

The figures are those of Llama 3's tokenizer on texts of each kind.
"""

import argparse
import base64
import heapq
import inspect
import json
import random
import statistics
import textwrap
import time
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.mock_server import tokenizer

PROSE = """
The committee met on Tuesday to discuss the proposed changes to the river crossing. A farmer from
the northern bank said that his animals had always used the shallow water near the mill, and he
wondered if the works would disturb them. People who had never spoken to one another found
themselves sharing a table at the market, and children who had grown up within sight of each other
finally learned each other's names. Some of the older inhabitants complained about the noise, while
others admitted that they enjoyed having something new to look at. Historians have argued about the
origin of the crossing for many years. Whatever the truth may be, the records from that period are
incomplete, and the few letters which survive mention the subject only in passing. She was born in
Nowy Targ on 14 March 1847, the third of five daughters of a watchmaker, and studied in Zurich
under Friedrich Hegetschweiler. The Khabarovsk-Nikolaevsk railway, opened in 1932, is 218.5 km long
and has 27 stations; in 2011 it carried 3.7 million passengers, about 12% fewer than in 1988.
Photosynthesis in purple bacteria differs from that of cyanobacteria: bacteriochlorophyll absorbs
near 870 nm, no oxygen is evolved, and hydrogen sulphide often serves as electron donor.
"""
MARKDOWN_BITS = (
    "# Getting started\n",
    "## Installation requirements\n",
    "- Read the documentation before upgrading\n- Report problems through the public forum\n",
    "**Important:** the configuration directory must already exist.\n",
    "| Feature                 | Available |\n|-------------------------|-----------|\n",
    "See the [contribution guidelines](CONTRIBUTING.md) for more information.\n",
    "1. Create a repository\n2. Configure permissions\n3. Invite collaborators\n",
    "--------------------------------\n",
)
CHINESE = (
    "科学家发现了一种新的材料，可以有效提高电池的使用寿命。",
    "由于天气原因，原定于下午举行的比赛被推迟到明天。",
    "这家餐厅的菜味道很好，价格也比较便宜，值得推荐。",
    "图书馆里非常安静，大家都在认真地准备即将到来的考试。",
)
JAPANESE = (
    "電車が遅れたため、会議に間に合いませんでした。",
    "駅の前に新しいデパートができて、とても便利になりました。",
    "この本は友達に勧められて読みましたが、とても面白かったです。",
    "子どものころ、祖母がよく昔話を聞かせてくれたことを覚えています。",
)
ARABIC = (
    "اكتشف العلماء مادة جديدة يمكنها أن تزيد من عمر البطارية بشكل ملحوظ.",
    "قال المعلم للطلاب إن أهم شيء في تعلم اللغة هو الصبر والممارسة المستمرة.",
    "إذا كان لديك أي سؤال فلا تتردد في الاتصال بنا في أي وقت.",
    "جاء الربيع وتفتحت الأزهار على الجبال وامتلأ الهواء برائحة جميلة.",
)
RUSSIAN = (
    "Учёные обнаружили новый материал, который позволяет увеличить срок службы батареи.",
    "Учитель объяснил студентам, что главное в изучении языка — терпение и практика.",
    "Компания решила расширить производство и увеличить вложения в исследования.",
    "После трёх лет напряжённой работы они наконец завершили этот сложный проект.",
)
THAI = (
    "ประวัติศาสตร์ของเมืองนี้ยาวนานมากและมีนักท่องเที่ยวมาเยี่ยมชมทุกปี",
    "เนื่องจากสภาพอากาศไม่ดีการแข่งขันจึงถูกเลื่อนออกไปเป็นวันพรุ่งนี้",
    "บริษัทตัดสินใจขยายการผลิตในปีหน้าและเพิ่มการลงทุนด้านการวิจัย",
    "ฤดูใบไม้ผลิมาถึงแล้วดอกไม้บนภูเขาบานสะพรั่งและอากาศเต็มไปด้วยกลิ่นหอม",
)


def sentences(pool: tuple[str, ...] | list[str], number: int, glue: str, seed: int = 1) -> str:
    return glue.join(random.Random(seed).choices(pool, k=number))


def prose(number: int = 400, seed: int = 1) -> str:
    text = PROSE.replace("\n", " ").strip()
    return sentences([part + "." for part in text.split(". ")], number, " ", seed)


def markdown() -> str:
    draw = random.Random(2)
    return "".join(prose(3, n) + "\n\n" + draw.choice(MARKDOWN_BITS) + "\n" for n in range(200))


def code() -> str:
    snippets = [
        textwrap.dedent(inspect.getsource(getattr(module, name)))
        for module in (argparse, heapq, inspect, json, random, statistics, textwrap, typing)
        for name in dir(module)
        if inspect.isfunction(getattr(module, name))
        and getattr(module, name).__module__ == module.__name__
    ]
    return "\n\n".join(snippets)


def minified_json() -> str:
    draw = random.Random(3)
    text = "order status active pending customer address product shipping account region"
    words = text.split()
    rows = [
        {
            "id": draw.randrange(100_000),
            "name": " ".join(draw.sample(words, 2)),
            "active": bool(number % 2),
            "score": round(draw.random() * 100, 2),
            "tags": draw.sample(words, 3),
            "created_at": f"2025-{number % 12 + 1:02}-{number % 28 + 1:02}T10:{number % 60:02}:00Z",
            "description": " ".join(draw.choices(words, k=12)),
        }
        for number in range(300)
    ]
    return json.dumps(rows, separators=(",", ":"))


def number_csv() -> str:
    draw = random.Random(4)
    return "\n".join(
        ",".join(f"{draw.uniform(0, 1000):.{draw.choice((2, 3, 4))}f}" for _ in range(8))
        for _ in range(500)
    )


KINDS = {
    "prose": (4.53, prose),
    "markdown": (4.83, markdown),
    "code": (3.54, code),
    "minified JSON": (3.99, minified_json),
    "Chinese": (3.41, lambda: sentences(CHINESE, 300, "")),
    "Japanese": (3.85, lambda: sentences(JAPANESE, 300, "")),
    "Arabic": (4.80, lambda: sentences(ARABIC, 300, " ")),
    "Russian": (5.93, lambda: sentences(RUSSIAN, 300, " ")),
    "Thai": (5.88, lambda: sentences(THAI, 300, " ")),
    "base64": (1.54, lambda: base64.b64encode(random.Random(5).randbytes(30_000)).decode()),
    "number CSV": (1.81, number_csv),
}


def ratio(text: str) -> float:
    return len(text.encode()) / tokenizer.count(text)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_token_are_within_5_percent_of_the_table(kind: str) -> None:
    expected, make = KINDS[kind]
    assert ratio(make()) == pytest.approx(expected, rel=0.05)


def test_documents_of_one_kind_differ() -> None:
    # Not a constant division: 1,000-token pieces of one source scatter around its mean.
    text = code()
    step = 3540
    ratios = [ratio(text[at : at + step]) for at in range(0, len(text) - step, step)]
    spread = statistics.pstdev(ratios) / statistics.mean(ratios)
    assert len(ratios) > 20
    assert 0.02 < spread < 0.15


@given(st.text(st.characters(codec=None)))
def test_count_is_the_length_of_encode_for_any_text(text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.count(text) == len(ids)
    assert all(0 <= token < tokenizer.VOCABULARY for token in ids)
    assert len(ids) <= len(text.encode("utf-8", "surrogatepass"))
    assert (len(ids) == 0) == (text == "")


@given(st.text(), st.text())
def test_joining_two_texts_moves_the_count_by_a_few_tokens(first: str, second: str) -> None:
    apart = tokenizer.count(first) + tokenizer.count(second)
    joined = tokenizer.count(first + second)
    assert abs(joined - apart) <= 40  # one cut at most changes: 32 characters


STABLE_IDS = [29826, 31947, 23150, 53573, 25810, 20779]
STABLE_HASHES = (-4000325840673078145, 5465495803734363)


def test_ids_are_stable_between_processes() -> None:
    # crc32 of the pieces, not Python's salted hash: the figures are written down here.
    assert tokenizer.encode("Hello world, 12345") == STABLE_IDS
    assert tokenizer.block_hashes(range(32)) == STABLE_HASHES


def test_block_hashes_are_chained_and_cover_full_blocks() -> None:
    ids = tokenizer.encode(prose(40))
    hashes = tokenizer.block_hashes(ids)
    assert len(hashes) == len(ids) // 16
    assert tokenizer.block_hashes(ids[:40]) == hashes[:2]
    changed = [ids[0] + 1, *ids[1:]]
    assert not set(tokenizer.block_hashes(changed)) & set(hashes)
    assert not set(tokenizer.block_hashes(ids, salt=7)) & set(hashes)
    assert tokenizer.block_hashes(ids[:15]) == ()


def test_the_chat_template_costs_fixed_tokens() -> None:
    user = {"role": "user", "content": "What is it?"}
    text = tokenizer.count("What is it?")
    request, message = tokenizer.CHAT_REQUEST_TOKENS, tokenizer.CHAT_MESSAGE_TOKENS
    assert len(tokenizer.encode_chat([user])) == request + message + text
    assert len(tokenizer.encode_chat([user, user])) == request + 2 * (message + text)
    assert len(tokenizer.encode_prompt("What is it?")) == tokenizer.PROMPT_TOKENS + text


def test_parts_images_tools_and_calls_are_counted() -> None:
    base = len(tokenizer.encode_chat([{"role": "user", "content": ""}]))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9999}}
    parts = [{"type": "text", "text": "hello there"}, image]
    assert (
        len(tokenizer.encode_chat([{"role": "user", "content": parts}]))
        == base + tokenizer.count("hello there") + tokenizer.IMAGE_TOKENS
    )
    call = {"function": {"name": "find", "arguments": '{"a":1}'}}
    message = {"role": "user", "content": None, "tool_calls": [call]}
    assert len(tokenizer.encode_chat([message])) == base + tokenizer.count('find{"a":1}')
    tool = {"type": "function", "function": {"name": "find"}}
    text = json.dumps(tool, separators=(",", ":"))
    with_tool = tokenizer.encode_chat([{"role": "user", "content": ""}], [tool])
    assert len(with_tool) == base + tokenizer.count(text)


def test_the_time_grows_with_the_text_only() -> None:
    text = prose(4000)
    half, whole = text[:100_000], text[:400_000]
    tokenizer.count(whole)
    assert min(_cpu_s(whole) for _ in range(5)) < 8 * min(_cpu_s(half) for _ in range(5))


def _cpu_s(text: str) -> float:
    started = time.process_time()
    tokenizer.count(text)
    return time.process_time() - started


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000, "=" * 100_000, "\u4e2d" * 50_000])
def test_degenerate_texts_do_not_hang(text: str) -> None:
    assert 0 < tokenizer.count(text) < len(text) + 1
