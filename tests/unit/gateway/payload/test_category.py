"""Categories of sample texts in several languages and kinds."""

import base64
import hashlib
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from gateway.estimate import learners
from gateway.payload import body, counting, members
from gateway.payload.body import read_body
from gateway.payload.counting import SAMPLE_CHARS, WINDOWS, classify, has_retrieval_headers, sample
from gateway.records.endpoint import CHAT

ENGLISH = (
    "The committee met on Tuesday to discuss the proposal, which (as several members noted) had "
    'changed considerably since the spring. "We are not there yet," said its chair; the vote is '
    "expected in the second week of March 2025.\n\nWhat follows is a summary of the discussion. "
)
GERMAN = (
    "Über allen Gipfeln ist Ruh, in allen Wipfeln spürest du kaum einen Hauch; die Vögelein "
    "schweigen im Walde. Warte nur, balde ruhest du auch. Größere Flüsse führen früher Hochwasser. "
)
FRENCH = (
    "Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux se "
    "fermaient si vite que je n'avais pas le temps de me dire : « Je m'endors. » "
)
SPANISH = (
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un "
    "hidalgo de los de lanza en astillero, adarga antigua, rocín flaco y galgo corredor. "
)
POLISH = (
    "Litwo! Ojczyzno moja! ty jesteś jak zdrowie; ile cię trzeba cenić, ten tylko się dowie, kto "
    "cię stracił. Dziś piękność twą w całej ozdobie widzę i opisuję, bo tęsknię po tobie. "
)
VIETNAMESE = (
    "Trăm năm trong cõi người ta, chữ tài chữ mệnh khéo là ghét nhau. Trải qua một cuộc bể dâu, "
    "những điều trông thấy mà đau đớn lòng. "
)
MARKDOWN = (
    "## Getting started\n\nInstall the tool first, then read the guide. It has three parts:\n\n"
    "- **Setup**, which explains what you need before you begin\n- Usage, with an example for each "
    "command\n- Troubleshooting, in case something does not work as described here\n\n"
)
DIALOGUE = (
    '"Where are you going?" she asked. "Nowhere," he said. "Then why the coat?"\n"It\'s cold '
    "out there, and I don't want to argue about it again.\" She sighed and closed the door. "
)
CHINESE = (
    "人工智能是计算机科学的一个分支，它企图了解智能的实质，并生产出一种新的能以人类智能相似的方式"
    "做出反应的智能机器。该领域的研究包括机器人、语言识别和图像识别等。"
)
JAPANESE = (
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で"
    "ニャーニャー泣いていた事だけは記憶している。"
)
KOREAN = (
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 "
    "양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다. "
)
RUSSIAN = (
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. "
    "Все смешалось в доме Облонских. "
)
ARABIC = (
    "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق، وقد وهبوا عقلا وضميرا وعليهم أن يعامل. "
)
HEBREW = "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון. "
GREEK = "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. "
THAI = "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม "
HINDI = "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। "
UKRAINIAN = "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені. "
TAMIL = "மனிதப் பிறிவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; அவர்கள் மதிப்பிலும் உரிமைகளிலும். "
JAVASCRIPT = """export async function load(id, { retries = 3 } = {}) {
  for (let i = 0; i < retries; i++) {
    const res = await fetch(`/api/items/${id}`, { headers: { accept: 'application/json' } });
    if (res.ok) return (await res.json()).data;
    if (res.status === 404) throw new NotFoundError(id);
  }
  return null;
}
"""
C_CODE = """static int ring_push(struct ring *r, const void *buf, size_t len)
{
    if (len > r->size - (r->head - r->tail))
        return -ENOSPC;
    for (size_t i = 0; i < len; i++)
        r->data[(r->head + i) & r->mask] = ((const unsigned char *)buf)[i];
    r->head += len;
    return 0;
}
"""
RUST = """impl<'a, T: Ord + Clone> Heap<'a, T> {
    pub fn pop(&mut self) -> Option<T> {
        let last = self.items.len().checked_sub(1)?;
        self.items.swap(0, last);
        let out = self.items.pop();
        self.sift_down(0);
        out
    }
}
"""
SQL = """SELECT u.id, count(*) AS n FROM users u JOIN orders o ON o.user_id = u.id
WHERE o.created_at >= now() - interval '7 days' AND (o.state = 'paid' OR o.state = 'sent')
GROUP BY u.id HAVING count(*) > 3 ORDER BY n DESC;
"""
HTML = """<div class="card" id="item-3"><h2>Title</h2><p>Some text here</p>
<ul><li><a href="/one">One</a></li><li><a href="/two">Two</a></li></ul></div>
"""
SHELL = """#!/bin/sh
set -eu
for f in "$@"; do
  [ -f "$f" ] || { echo "no $f" >&2; exit 1; }
  sed -e 's/foo/bar/g' "$f" | sort -u > "${f%.txt}.out"
done
"""
DIFF = """--- a/gateway/wiring/app.py
+++ b/gateway/wiring/app.py
@@ -10,7 +10,9 @@ def build(settings):
-    return App(settings)
+    app = App(settings)
+    app.start(now=clock())
+    return app
"""
RECORDS = json.dumps(
    [
        {"id": i, "name": f"user {i}", "email": f"u{i}@example.org", "active": True}
        for i in range(20)
    ]
)
NESTED = json.dumps(
    {"items": [{"sku": "a-1", "price": {"amount": 12.5, "currency": "EUR"}}] * 10}, indent=2
)
NUMBERS = json.dumps([[round(i * 0.37, 2) for i in range(12)] for _ in range(12)])
SCHEMA = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Weather of a city",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
                },
            },
        }
    ]
    * 3,
    separators=(",", ":"),
)


def source(module: ModuleType) -> str:
    """Also of a compiled module, which knows of none."""
    name = module.__name__.rpartition(".")[2]
    return (Path(str(module.__file__)).parent / f"{name}.py").read_text()


RANDOM = random.Random(7)
BASE64 = base64.b64encode(RANDOM.randbytes(900)).decode()
HEX = "".join(hashlib.sha256(bytes([i])).hexdigest() for i in range(20))
DIGITS = " ".join(str(RANDOM.randrange(10**8)) for _ in range(120))

SAMPLES = [
    *(("prose", text) for text in (ENGLISH, GERMAN, FRENCH, SPANISH, POLISH, VIETNAMESE)),
    *(("prose", text) for text in (MARKDOWN, DIALOGUE, "Hello, how are you today?", "hi", "")),
    *(("cjk", text) for text in (CHINESE, JAPANESE, KOREAN, "你好", CHINESE + " GPU API ")),
    *(("other-script", text) for text in (RUSSIAN, ARABIC, HEBREW, GREEK, THAI, HINDI)),
    *(("other-script", text) for text in (UKRAINIAN, TAMIL, "Привет")),
    *(("code", source(module)) for module in (body, members, counting, learners)),
    *(("code", text) for text in (JAVASCRIPT, C_CODE, RUST, SQL, HTML, SHELL, DIFF)),
    *(("json", text) for text in (RECORDS, NESTED, NUMBERS, SCHEMA)),
    *(("mixed", text) for text in (BASE64, HEX, DIGITS, ENGLISH + CHINESE, RUSSIAN + ENGLISH)),
    *(("mixed", text) for text in (CHINESE + RUSSIAN, JAVASCRIPT + RUSSIAN * 2)),
    ("mixed", ENGLISH * 2 + JAVASCRIPT),
]


@pytest.mark.parametrize("times", [1, 100])
def test_at_least_nine_in_ten_samples_are_told_right_however_often_repeated(times: int) -> None:
    told = [
        (expected, classify(sample(text if times == 1 else (text + " ") * times)), text[:40])
        for expected, text in SAMPLES
    ]
    wrong = [one for one in told if one[0] != one[1]]
    assert len(wrong) <= len(SAMPLES) // 10, wrong


@pytest.mark.parametrize("size", [0, 10, 1024, 1025, 5000, 90_000])
@pytest.mark.parametrize("alphabet", ["abcdefghij", "\u4f60\u597d\u4e16\u754c\uff0c"])
def test_samples_are_bounded_and_spread_over_the_text(size: int, alphabet: str) -> None:
    text = "".join(letter * (size // len(alphabet)) for letter in alphabet)
    found = sample(text)
    assert len(found) <= SAMPLE_CHARS + WINDOWS
    assert len(found) >= min(len(text), SAMPLE_CHARS // 2)
    assert len(set(found) - {"\n"}) >= min(WINDOWS, len(set(text)))


def test_the_longest_text_decides_not_the_first() -> None:
    messages = [{"role": "system", "content": ENGLISH}, {"role": "user", "content": CHINESE * 60}]
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    assert read_body(CHAT, raw).measure.category == "cjk"


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"\n[{i}] {ENGLISH}" for i in (1, 2, 3)),
        "".join(f"Document [{i}] (title)\n{ENGLISH}\n" for i in (1, 2)),
        f"Answer from these.\n<documents><document index='1'>{ENGLISH * 2}</document></documents>",
        "".join(f"### Passage {i}\n{ENGLISH}\n" for i in (1, 2)),
    ],
)
def test_retrieval_headers_are_marked(text: str) -> None:
    assert has_retrieval_headers(["short question", text])
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    found = read_body(CHAT, raw).measure
    assert found.rag
    assert found.category == "prose"


@pytest.mark.parametrize("text", [ENGLISH * 5, MARKDOWN * 3, JAVASCRIPT * 5, HTML * 5, RECORDS, ""])
def test_ordinary_texts_are_not_marked(text: str) -> None:
    assert not has_retrieval_headers([text])
