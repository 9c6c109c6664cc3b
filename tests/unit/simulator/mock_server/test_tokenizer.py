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
The committee met on Tuesday to discuss the proposed changes to the river crossing. Most of the
residents who attended were in favour of the new bridge, although several of them asked whether
the old ferry would continue to run during the summer months. The engineer explained that the
foundations had been surveyed twice, and that the second survey found nothing to contradict the
first. A farmer from the northern bank said that his animals had always used the shallow water
near the mill, and he wondered if the works would disturb them. Nobody could give him a definite
answer, but the chairwoman promised to write to the council before the end of the week.
When the weather turned cold, the builders moved their equipment under the trees and waited for
the ground to dry. In the evenings they played cards and listened to the radio, and sometimes one
of the villagers would bring them bread and soup. By the middle of March the first stones had been
laid, and visitors began to arrive from the surrounding towns to see what all the talk was about.
It is often said that a bridge changes the places at both of its ends. People who had never spoken
to one another found themselves sharing a table at the market, and children who had grown up within
sight of each other finally learned each other's names. Some of the older inhabitants complained
about the noise, while others admitted that they enjoyed having something new to look at.
Historians have argued about the origin of the crossing for many years. According to one account,
a merchant paid for the earliest structure in order to shorten the journey to the harbour; another
suggests that the monks built it, and that the merchant only repaired it after a flood. Whatever the
truth may be, the records from that period are incomplete, and the few letters which survive mention
the subject only in passing. What remains certain is that the traffic increased every year.
Elisabeth Kowalczyk (1847-1913) was a Polish cartographer, botanist and mountaineer, best known for
her 1889 survey of the Tatra range. She was born in Nowy Targ on 14 March 1847, the third of five
daughters of a watchmaker, and studied in Zurich under Friedrich Hegetschweiler. Her "Atlas of the
Western Carpathians", published in 1894, listed 1,264 species in 38 plates and sold 4,200 copies.
The Khabarovsk-Nikolaevsk railway, opened in 1932, is 218.5 km long and has 27 stations; in 2011 it
carried 3.7 million passengers, about 12% fewer than in 1988. Its gauge is 1,520 mm, and the ruling
gradient between Dormidontovka and Vyazemskaya is 0.9%. Electrification (25 kV AC) took until 1999.
Photosynthesis in purple bacteria differs from that of cyanobacteria: bacteriochlorophyll absorbs
near 870 nm, no oxygen is evolved, and hydrogen sulphide often serves as electron donor. Gest and
Kamen demonstrated nitrogen fixation by Rhodospirillum rubrum in 1949. The Treaty of Kucuk Kaynarca,
signed on 21 July 1774, ended the Russo-Turkish War; Crimea became nominally independent, and ships
of the Empire gained passage through the Dardanelles. Mbeki, Ouattara and Vajpayee attended.
"""
MARKDOWN_BITS = (
    """# Getting started
""",
    """## Installation requirements
""",
    """- Download the latest release and unpack the archive
- Read the documentation before upgrading
- Report problems through the public discussion forum
""",
    """**Important:** the configuration directory must already exist.
""",
    """| Feature                 | Available |
|-------------------------|-----------|
| Incremental compilation | Yes       |
""",
    """See the [contribution guidelines](CONTRIBUTING.md) for more information.
""",
    """1. Create a repository
2. Configure permissions
3. Invite collaborators
""",
    """--------------------------------
""",
)
CHINESE = (
    "今天早上我们在公园里散步，看到很多人正在锻炼身体。",
    "这座城市的历史非常悠久，每年都有大量游客前来参观。",
    "科学家发现了一种新的材料，可以有效提高电池的使用寿命。",
    "他从小就喜欢读书，尤其是关于历史和地理方面的作品。",
    "由于天气原因，原定于下午举行的比赛被推迟到明天。",
    "老师告诉学生们，学习语言最重要的是坚持和兴趣。",
    "公司决定在明年扩大生产规模，并增加对研究的投资。",
    "如果你有任何问题，请随时与我们的客服人员联系。",
    "春天到了，山上的花都开了，空气里充满了香味。",
    "政府宣布将采取更多措施，改善农村地区的交通条件。",
    "这家餐厅的菜味道很好，价格也比较便宜，值得推荐。",
    "经过三年的努力，他们终于完成了这项复杂的工程。",
    "互联网改变了人们的生活方式，也带来了新的挑战。",
    "医生建议他多喝水，少熬夜，并且每天坚持运动半小时。",
    "图书馆里非常安静，大家都在认真地准备即将到来的考试。",
    "昨天晚上突然下起了大雨，很多街道都被水淹没了。",
    "她用自己的积蓄开了一家小书店，专门卖旧书和杂志。",
    "专家认为，保护环境需要全社会共同参与和长期投入。",
)
JAPANESE = (
    "今朝は早く起きて、近くの公園をゆっくり散歩しました。",
    "この町には古いお寺がたくさんあり、毎年多くの観光客が訪れます。",
    "新しいコンピューターを買ったので、古いものは弟にあげました。",
    "電車が遅れたため、会議に間に合いませんでした。",
    "彼女は大学で歴史を勉強しながら、レストランでアルバイトをしています。",
    "来週の天気予報によると、週末は雨が降るそうです。",
    "日本語の文法は難しいですが、毎日練習すれば上手になります。",
    "先生は学生たちに、わからないことがあれば質問するように言いました。",
    "インターネットのおかげで、世界中のニュースをすぐに読むことができます。",
    "駅の前に新しいデパートができて、とても便利になりました。",
    "夏休みに家族と海へ行って、きれいな魚をたくさん見ました。",
    "この本は友達に勧められて読みましたが、とても面白かったです。",
    "会社の同僚と一緒に昼ごはんを食べながら、仕事の話をしました。",
    "健康のために、エレベーターを使わないで階段を上るようにしています。",
    "子どものころ、祖母がよく昔話を聞かせてくれたことを覚えています。",
    "問題を解決するためには、みんなで協力することが大切だと思います。",
)
ARABIC = (
    "ذهبنا في الصباح إلى الحديقة القريبة ورأينا كثيرا من الناس يمارسون الرياضة.",
    "تاريخ هذه المدينة طويل جدا ويزورها السياح من جميع أنحاء العالم كل عام.",
    "اكتشف العلماء مادة جديدة يمكنها أن تزيد من عمر البطارية بشكل ملحوظ.",
    "كان يحب القراءة منذ صغره وخاصة الكتب التي تتحدث عن التاريخ والجغرافيا.",
    "بسبب سوء الأحوال الجوية تم تأجيل المباراة إلى يوم غد.",
    "قال المعلم للطلاب إن أهم شيء في تعلم اللغة هو الصبر والممارسة المستمرة.",
    "قررت الشركة توسيع الإنتاج في العام القادم وزيادة الاستثمار في البحث العلمي.",
    "إذا كان لديك أي سؤال فلا تتردد في الاتصال بنا في أي وقت.",
    "جاء الربيع وتفتحت الأزهار على الجبال وامتلأ الهواء برائحة جميلة.",
    "أعلنت الحكومة أنها ستتخذ إجراءات جديدة لتحسين الطرق في المناطق الريفية.",
    "الطعام في هذا المطعم لذيذ والأسعار مناسبة لجميع الزوار.",
    "بعد ثلاث سنوات من العمل المتواصل تمكنوا من إنجاز هذا المشروع الكبير.",
    "غيرت شبكة الإنترنت حياة الناس وجلبت معها تحديات كثيرة.",
    "نصح الطبيب المريض بشرب الماء والنوم مبكرا والمشي كل يوم.",
)
RUSSIAN = (
    "Сегодня утром мы гуляли в парке и видели много людей, которые занимались спортом.",
    "История этого города очень длинная, и каждый год сюда приезжают тысячи туристов.",
    "Учёные обнаружили новый материал, который позволяет увеличить срок службы батареи.",
    "С детства он любил читать, особенно книги по истории и географии.",
    "Из-за плохой погоды соревнования были перенесены на следующий день.",
    "Учитель объяснил студентам, что главное в изучении языка — терпение и практика.",
    "Компания решила расширить производство и увеличить вложения в исследования.",
    "Если у вас возникнут вопросы, пожалуйста, обратитесь в службу поддержки.",
    "Пришла весна, на холмах распустились цветы, и воздух наполнился приятным запахом.",
    "Правительство объявило о новых мерах по улучшению дорог в сельской местности.",
    "В этом ресторане вкусно готовят, и цены вполне доступны для большинства посетителей.",
    "После трёх лет напряжённой работы они наконец завершили этот сложный проект.",
    "Интернет изменил жизнь людей и принёс с собой множество новых возможностей.",
    "Врач посоветовал ему больше двигаться, меньше нервничать и раньше ложиться спать.",
)
THAI = (
    "เช้านี้เราไปเดินเล่นในสวนสาธารณะและเห็นผู้คนมากมายกำลังออกกำลังกาย",
    "ประวัติศาสตร์ของเมืองนี้ยาวนานมากและมีนักท่องเที่ยวมาเยี่ยมชมทุกปี",
    "นักวิทยาศาสตร์ค้นพบวัสดุชนิดใหม่ที่ช่วยยืดอายุการใช้งานของแบตเตอรี่",
    "เขาชอบอ่านหนังสือตั้งแต่เด็กโดยเฉพาะหนังสือเกี่ยวกับประวัติศาสตร์และภูมิศาสตร์",
    "เนื่องจากสภาพอากาศไม่ดีการแข่งขันจึงถูกเลื่อนออกไปเป็นวันพรุ่งนี้",
    "ครูบอกนักเรียนว่าสิ่งสำคัญที่สุดในการเรียนภาษาคือความอดทนและการฝึกฝน",
    "บริษัทตัดสินใจขยายการผลิตในปีหน้าและเพิ่มการลงทุนด้านการวิจัย",
    "หากคุณมีคำถามใดๆ กรุณาติดต่อเจ้าหน้าที่ของเราได้ตลอดเวลา",
    "ฤดูใบไม้ผลิมาถึงแล้วดอกไม้บนภูเขาบานสะพรั่งและอากาศเต็มไปด้วยกลิ่นหอม",
    "รัฐบาลประกาศว่าจะใช้มาตรการใหม่เพื่อปรับปรุงถนนในพื้นที่ชนบท",
    "อาหารในร้านนี้อร่อยมากและราคาไม่แพงเหมาะสำหรับทุกคน",
    "หลังจากทำงานหนักมาสามปีในที่สุดพวกเขาก็สร้างโครงการนี้สำเร็จ",
    "อินเทอร์เน็ตเปลี่ยนวิถีชีวิตของผู้คนและนำความท้าทายใหม่ๆ มาด้วย",
    "หมอแนะนำให้เขาดื่มน้ำมากขึ้นและออกกำลังกายทุกวัน",
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


def test_longer_and_rarer_words_cost_more() -> None:
    draw = random.Random(6)

    def word(length: int) -> str:
        return "".join(draw.choice("bdlmnrst") + draw.choice("aeio") for _ in range(length // 2))

    def pieces(length: int) -> float:
        return sum(tokenizer.count(" " + word(length)) for _ in range(500)) / 500

    short, middle, long = pieces(4), pieces(8), pieces(14)
    assert 1 <= short < middle < long
    assert tokenizer.count(" strengths") < tokenizer.count(" xkqvbzwpt")


@given(st.text(st.characters(codec=None)))
def test_count_is_the_length_of_encode_for_any_text(text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.count(text) == len(ids)
    assert all(0 <= token < tokenizer.VOCABULARY for token in ids)
    assert len(ids) <= len(text.encode("utf-8", "surrogatepass"))
    assert (len(ids) == 0) == (text == "")


def test_lone_surrogates_are_text() -> None:
    assert tokenizer.count("a\ud83d b\udc00") >= 2
    assert tokenizer.encode_chat([{"role": "user\ud800", "content": "x\udfff"}])


@given(st.text(), st.text())
def test_joining_two_texts_moves_the_count_by_a_few_tokens(first: str, second: str) -> None:
    apart = tokenizer.count(first) + tokenizer.count(second)
    joined = tokenizer.count(first + second)
    assert abs(joined - apart) <= 40  # one cut at most changes: 32 characters


def test_joining_documents_is_nearly_additive() -> None:
    texts = [make() for _, make in KINDS.values()]
    apart = sum(map(tokenizer.count, texts))
    assert tokenizer.count("".join(texts)) == pytest.approx(apart, rel=0.001)


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
