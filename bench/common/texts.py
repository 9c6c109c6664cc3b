"""Prompts of a given kind and length, from real text; deterministic for a seed.

Prose and code are the standard library's own documentation and sources, JSON is random nested
records, other scripts are sentences written for this bench. A document is assembled from runs of
its sources, so that bytes per token vary between documents as in traffic. Lengths are counted
with the mock engine's tokenizer; a document's count is the sum of its pieces', accurate to a few
tokens.
"""

import random
import re
import string
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final, Literal, get_args

import msgspec
import orjson

from simulator.mock_server import tokenizer

# -- sentences in scripts other than Latin, for the documents of bench.common.texts


CHINESE: Final = (
    "春天来了，院子里的桃花一夜之间全开了。",
    "请把昨天会议的记录整理好，下午三点以前发给我。",
    "这家小店的牛肉面汤头浓郁，价格也很公道。",
    "随着人口老龄化加剧，社区养老服务的需求正在迅速增长。",
    "他从小在海边长大，对潮汐和风向有一种天然的直觉。",
    "系统在凌晨两点进行了升级，部分用户可能需要重新登录。",
    "如果明天下雨，运动会就推迟到下个星期五举行。",
    "科学家发现，这种深海鱼类能够在完全黑暗的环境中辨别颜色。",
    "奶奶总说，做人要像竹子一样，既有节又虚心。",
    "本季度的营业收入同比增长百分之十二，但净利润略有下降。",
    "图书馆二楼新设了安静的自习区，每天开放到晚上十点。",
    "火车穿过长长的隧道，眼前忽然出现了一片金黄的稻田。",
    "医生建议他少吃盐，多走路，每半年复查一次血压。",
    "这部电影改编自一部获奖小说，讲述了三代人的命运。",
    "为了节约用水，市政府决定在夏季实行阶梯水价。",
    "数据库的索引设计不合理，导致查询速度越来越慢。",
    "孩子们围坐在火堆旁，听老人讲述关于狐狸和月亮的故事。",
    "合同自双方签字盖章之日起生效，有效期为两年。",
    "北方的冬天干燥寒冷，南方的冬天却潮湿阴冷。",
    "我们需要在成本、质量和交付时间之间找到平衡。",
    "那位画家一生清贫，死后作品却价值连城。",
    "学习一门外语最重要的是坚持，每天哪怕只读十分钟。",
    "桥梁的钢结构每年都要检查，防止锈蚀影响安全。",
    "她把信折好放进抽屉，再也没有提起过那个夏天。",
    "根据最新的气象资料，台风将于周三夜间在沿海登陆。",
    "这道题有两种解法，第一种用几何，第二种用方程。",
    "市场上的蔬菜种类很多，价格却比去年贵了不少。",
    "工程师们花了三个月时间，终于解决了电池过热的问题。",
)
JAPANESE: Final = (
    "春になると、川沿いの桜並木が一斉に花を咲かせる。",
    "会議の資料は、明日の午前中までに共有フォルダへ保存してください。",
    "この店のラーメンは、魚介の出汁がよく効いていておいしい。",
    "彼は若いころ、貨物船に乗って世界中の港を回ったそうだ。",
    "サーバーの負荷が高いため、ページの表示に時間がかかっています。",
    "電車が遅れたせいで、面接の時間に間に合わなかった。",
    "祖母は毎朝、庭の畑で採れた野菜を近所の人に配っている。",
    "新しい条例により、公園での花火は夜九時までとなりました。",
    "研究チームは、深海の微生物がプラスチックを分解する仕組みを明らかにした。",
    "契約書の内容をよく確認してから、署名と捺印をお願いいたします。",
    "山の上から見下ろすと、町の明かりが星のように瞬いていた。",
    "子どもたちは雪だるまを作ったり、そりで坂を滑ったりして遊んだ。",
    "その小説は、戦後の東京で生きる姉妹の姿を静かに描いている。",
    "データベースのバックアップは、毎週日曜日の深夜に自動で行われる。",
    "薬は食後三十分以内に、水かぬるま湯で飲んでください。",
    "台風が近づいているので、窓の補強と非常食の準備を済ませておこう。",
    "この問題を解くには、まず条件を図に書き出してみるとよい。",
    "売上は前年同期に比べて八パーセント増えたが、利益は横ばいだった。",
    "彼女は黙って手紙を読み終えると、窓の外に目をやった。",
    "アルバイトの募集要項は、公式サイトのお知らせ欄に掲載されています。",
    "昔の人は、風の匂いで雨が降るかどうかを知ったという。",
    "ソフトウェアの更新が終わったら、端末を再起動してください。",
    "図書館では、古い地図や写真を自由に閲覧することができる。",
    "職人は一本の木を何日もかけて削り、美しい器に仕上げた。",
    "英語で話すのは苦手だが、読むことならそれほど苦にならない。",
    "工場の見学は予約制で、一回につき二十名まで受け付けている。",
    "猫は日当たりのよい縁側で、気持ちよさそうに眠っている。",
    "人工知能の発展によって、翻訳の質はここ数年で大きく向上した。",
)
RUSSIAN: Final = (
    "Весной река разлилась и затопила нижнюю часть деревни.",
    "Пожалуйста, пришлите отчёт до конца рабочего дня в пятницу.",
    "Учёные обнаружили новый вид глубоководных рыб у берегов Камчатки.",
    "Мой дед строил мосты и всю жизнь прожил в маленьком городе на Волге.",
    "Сервер временно недоступен, повторите попытку через несколько минут.",
    "Если завтра пойдёт дождь, экскурсию перенесут на следующую неделю.",
    "В библиотеке открылась выставка старинных карт и рукописей.",
    "Договор вступает в силу с момента подписания обеими сторонами.",
    "Он долго молчал, глядя на огонь, и наконец рассказал всю правду.",
    "Цены на овощи выросли почти на четверть по сравнению с прошлым годом.",
    "Программа сжимает данные перед отправкой, чтобы снизить нагрузку на сеть.",
    "Дети построили во дворе снежную крепость и играли до темноты.",
    "Врач посоветовал больше гулять и меньше сидеть за компьютером.",
    "Поезд опоздал на сорок минут из-за сильной метели.",
    "Эта книга рассказывает о судьбе трёх поколений одной семьи.",
    "Инженеры проверили прочность конструкции и не нашли дефектов.",
    "Осенью в лесу пахнет грибами, мокрыми листьями и дымом.",
    "Решение задачи сводится к системе двух линейных уравнений.",
    "Команда решила отложить выпуск новой версии до исправления ошибок.",
    "На рынке продавали мёд, яблоки и свежий хлеб.",
)
ARABIC: Final = (
    "تفتح المكتبة العامة أبوابها كل يوم من الساعة التاسعة صباحا.",
    "وصل القطار متأخرا بسبب العاصفة الرملية التي ضربت المنطقة.",
    "يرجى إرسال التقرير النهائي قبل نهاية الأسبوع القادم.",
    "كان جدي صيادا يعرف مواعيد المد والجزر دون أن ينظر إلى الساعة.",
    "اكتشف العلماء نوعا جديدا من النباتات في أعماق الصحراء.",
    "ارتفعت أسعار الخضروات في السوق مقارنة بالعام الماضي.",
    "جلس الأطفال حول النار يستمعون إلى حكايات الجدة عن القمر والثعلب.",
    "يدخل العقد حيز التنفيذ من تاريخ توقيعه من قبل الطرفين.",
    "تحتاج هذه المسألة إلى حل معادلتين من الدرجة الأولى.",
    "نصحه الطبيب بالمشي يوميا وتقليل الملح في الطعام.",
    "يقع البيت القديم على تلة تطل على البحر وأشجار الزيتون.",
    "توقفت الخدمة مؤقتا بسبب أعمال الصيانة، وستعود خلال ساعات.",
    "تروي هذه الرواية قصة ثلاث أخوات عشن في مدينة بعيدة.",
    "قرر المجلس تأجيل المشروع حتى تتوفر الميزانية اللازمة.",
    "القهوة في هذا المقهى طيبة الرائحة وثمنها معقول.",
    "يتعلم الطلاب البرمجة من خلال مشاريع صغيرة يعملون عليها معا.",
    "هبت الرياح طوال الليل وسقطت أوراق الأشجار في الشوارع.",
    "أعلنت الشركة عن زيادة أرباحها في الربع الثالث من السنة.",
    "من يتعلم لغة جديدة يفتح نافذة على عالم آخر.",
    "فحص المهندسون الجسر بعد الفيضان ولم يجدوا أي ضرر.",
)
THAI: Final = (
    "ห้องสมุดเปิดให้บริการทุกวันตั้งแต่แปดโมงเช้าถึงสองทุ่ม",
    "ฝนตกหนักตั้งแต่เมื่อคืน ทำให้ถนนหลายสายมีน้ำท่วมขัง",
    "กรุณาส่งรายงานฉบับสมบูรณ์ภายในวันศุกร์นี้",
    "คุณยายตื่นแต่เช้าเพื่อทำอาหารใส่บาตรทุกวัน",
    "นักวิทยาศาสตร์ค้นพบปลาชนิดใหม่ในทะเลลึกใกล้เกาะทางใต้",
    "ราคาผักในตลาดสูงขึ้นมากเมื่อเทียบกับปีที่แล้ว",
    "เด็กๆ วิ่งเล่นอยู่ริมแม่น้ำจนพระอาทิตย์ตกดิน",
    "ระบบจะปิดปรับปรุงชั่วคราวในคืนวันอาทิตย์",
    "หนังสือเล่มนี้เล่าเรื่องชีวิตของคนสามรุ่นในหมู่บ้านเล็กๆ",
    "หมอแนะนำให้ออกกำลังกายสม่ำเสมอและดื่มน้ำให้เพียงพอ",
    "สัญญาฉบับนี้มีผลบังคับใช้ตั้งแต่วันที่ลงนามเป็นต้นไป",
    "ก๋วยเตี๋ยวร้านนี้อร่อยและราคาไม่แพง คนจึงต่อคิวยาวทุกเที่ยง",
    "ทีมวิศวกรใช้เวลาสามเดือนแก้ปัญหาแบตเตอรี่ร้อนเกินไป",
    "การเรียนภาษาต้องอาศัยความอดทนและการฝึกฝนทุกวัน",
    "รถไฟขบวนสุดท้ายออกจากสถานีตอนห้าทุ่มครึ่ง",
    "ข้อมูลทั้งหมดถูกสำรองไว้ในเครื่องแม่ข่ายอีกแห่งหนึ่ง",
    "ลมหนาวพัดมาจากทางเหนือ ดอกไม้บนภูเขาเริ่มบาน",
    "บริษัทประกาศผลประกอบการไตรมาสที่สามดีกว่าที่คาดไว้",
)
HINDI: Final = (
    "गाँव के बीच में एक पुराना बरगद का पेड़ है, जिसके नीचे लोग शाम को बैठते हैं।",
    "कृपया अपनी रिपोर्ट शुक्रवार तक कार्यालय में जमा कर दें।",
    "इस साल बारिश देर से आई, इसलिए किसानों को चिंता होने लगी।",
    "वैज्ञानिकों ने समुद्र की गहराई में मछली की एक नई प्रजाति खोजी है।",
    "मेरी दादी हर रात हमें चाँद और लोमड़ी की कहानी सुनाती थीं।",
    "सर्वर पर काम चल रहा है, कृपया कुछ देर बाद फिर प्रयास करें।",
    "बाज़ार में सब्ज़ियों के दाम पिछले साल की तुलना में बहुत बढ़ गए हैं।",
    "पुस्तकालय सुबह नौ बजे खुलता है और रात आठ बजे बंद होता है।",
    "यह उपन्यास एक छोटे शहर में रहने वाली तीन बहनों की कहानी है।",
    "डॉक्टर ने उसे रोज़ टहलने और नमक कम खाने की सलाह दी।",
    "समझौता दोनों पक्षों के हस्ताक्षर के दिन से लागू होगा।",
    "रेलगाड़ी कोहरे के कारण दो घंटे देर से पहुँची।",
    "इस सवाल को हल करने के दो तरीके हैं, पहला आसान है।",
    "बच्चे नदी के किनारे पतंग उड़ा रहे थे और हँस रहे थे।",
    "कंपनी ने तीसरी तिमाही में अपने लाभ में वृद्धि की घोषणा की।",
    "नई भाषा सीखने के लिए धैर्य और रोज़ का अभ्यास ज़रूरी है।",
    "पुल की मरम्मत के बाद यातायात फिर से शुरू हो गया।",
    "सर्दियों की सुबह में अदरक वाली चाय का स्वाद ही कुछ और होता है।",
)


Kind = Literal["prose", "code", "json", "cjk", "other-script"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_MIN_RUN, _LONGEST_RUN = 100, 4000
"""Tokens taken from one source at a stretch, log-uniform."""
_PLAIN = frozenset(string.ascii_letters + " .,;:'\"-?!")
_DOCSTRING = re.compile(r'^[ \t]*r?"""(.*?)"""[ \t]*\n', re.DOTALL | re.MULTILINE)
_LINES_PER_CHUNK = 12
_MARKS = frozenset("()[]{}=<>")
_VOCABULARY: Final = (
    *("alpha", "invoice", "customer", "delivery", "region", "warehouse", "status", "pending"),
    *("shipped", "active", "archived", "temperature", "pressure", "sensor", "gateway"),
    *("upstream", "retry", "summary", "description", "payload", "network", "profile"),
    *("birthday", "language", "country", "currency", "balance", "account", "transfer"),
    *("deposit", "withdrawal"),
)


class SampleText(msgspec.Struct, frozen=True):
    """A text and the mock engine's count of its tokens, template not included."""

    pieces: tuple[str, ...]
    """The text in pieces that stand by themselves; joined they are the document."""
    tokens: int

    @property
    def text(self) -> str:
        """The whole document."""
        return "".join(self.pieces)


class _Chunk(msgspec.Struct, frozen=True):
    text: str
    tokens: int


_Source = tuple[_Chunk, ...]


def document(kind: Kind, tokens: int, rng: random.Random) -> SampleText:
    """A document of about `tokens` tokens (at least 8), drawn with `rng`."""
    return _json_document(tokens, rng) if kind == "json" else _text_document(kind, tokens, rng)


def _text_document(kind: Kind, tokens: int, rng: random.Random) -> SampleText:
    sources = _sources(kind)
    if kind in _LANGUAGES:
        # A document is in one language, on a few subjects: some sentences and not others.
        language = rng.choice(sources)
        sources = (tuple(rng.sample(language, 10)),)
    pieces: list[str] = []
    rest = tokens
    while rest > 0:
        source = rng.choice(sources)
        run = min(rest, round(_MIN_RUN * (_LONGEST_RUN / _MIN_RUN) ** rng.random()))
        at = rng.randrange(len(source))
        texts: list[str] = []
        while run > 0:
            chunk = source[at % len(source)]
            if chunk.tokens > rest:
                chunk = _cut(chunk, rest)
            texts.append(chunk.text)
            run -= chunk.tokens
            rest -= chunk.tokens
            at = rng.randrange(len(source)) if kind in _LANGUAGES else at + 1
        pieces.append("".join(texts))
    return SampleText(tuple(pieces), tokens - rest)


def _cut(chunk: _Chunk, tokens: int) -> _Chunk:
    """The beginning of a chunk, of at least one and about `tokens` tokens."""
    end = max(1, len(chunk.text) * tokens // chunk.tokens)
    text = chunk.text[:end]
    return _Chunk(text, max(1, tokenizer.count(text)))


# -- prose, code, sentences


@cache
def _sources(kind: Kind) -> tuple[_Source, ...]:
    """The sources of a kind; each holds at least one chunk."""
    if kind == "prose":
        said = ("\n\n".join(_DOCSTRING.findall(text)) for text in _modules())
        found = [_chunks(_paragraphs(text)) for text in (*topics.values(), *said)]
        return tuple(source for source in found if sum(c.tokens for c in source) > 200)
    if kind == "code":
        return tuple(_chunks(_code_pieces(text)) for text in _modules())
    return tuple(_chunks([s + end for s in lines]) for lines, end in _LANGUAGES[kind])


_LANGUAGES: Final[dict[str, tuple[tuple[Sequence[str], str], ...]]] = {
    "cjk": ((CHINESE, ""), (JAPANESE, "")),
    "other-script": ((RUSSIAN, " "), (ARABIC, " "), (THAI, " "), (HINDI, " ")),
}


def _chunks(texts: Sequence[str], glue: str = "") -> _Source:
    """Texts with what each adds to a document of its like: a cut may span two of them."""
    count = tokenizer.count
    return tuple(_Chunk(t, max(1, count(t + glue + t) - count(t))) for t in texts)


@cache
def _modules() -> tuple[str, ...]:
    """Sources of the standard library's modules of middle size."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(folder.glob("*.py")) if 12_000 < f.stat().st_size < 60_000]
    return tuple(f.read_text(encoding="utf-8") for f in files)


def _paragraphs(text: str) -> list[str]:
    """Paragraphs that are sentences, not grammar, tables or examples."""
    found = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [
        block + "\n\n"
        for block in found
        if len(block) >= 80 and sum(c in _PLAIN for c in block) >= 0.97 * len(block)
    ]


def _code_pieces(text: str) -> list[str]:
    lines = _DOCSTRING.sub("", text).splitlines(keepends=True)
    pieces = [lines[at : at + _LINES_PER_CHUNK] for at in range(0, len(lines), _LINES_PER_CHUNK)]
    return ["".join(piece) for piece in pieces if _is_code(piece)]


def _is_code(lines: Sequence[str]) -> bool:
    """Neither mostly comments and text, nor a table of numbers."""
    said = [line.strip() for line in lines if line.strip()]
    text = "".join(said)
    comments = sum(line.startswith("#") for line in said)
    statements = sum(not _MARKS.isdisjoint(line) for line in said)
    digits = sum(map(str.isdigit, text))
    return comments * 4 <= len(said) <= statements * 2 and digits * 6 <= len(text)


# -- JSON


def _json_document(tokens: int, rng: random.Random) -> SampleText:
    """An array of records of one to three shapes, minified."""
    shapes = rng.sample(_records(), rng.randint(2, 3))
    texts: list[str] = []
    rest = tokens - 2
    while rest > 0:
        fitting = rng.choice(shapes)
        chunk = rng.choice(fitting)
        if chunk.tokens > rest:
            small = [c for shape in _records() for c in shape if c.tokens <= rest]
            if not small:
                break
            chunk = max(small, key=lambda c: c.tokens)
        texts.append(chunk.text)
        rest -= chunk.tokens
    return SampleText(("[" + ",".join(texts) + "]",), tokens - rest)


@cache
def _records() -> tuple[_Source, ...]:
    """For each shape of record, many of them with random values."""
    rng = random.Random(20_240_501)
    return tuple(
        _chunks([orjson.dumps(make(rng)).decode() for _ in range(60)], ",") for make in _SHAPES
    )


def _words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(_VOCABULARY, k=rng.randint(low, high)))


def _order(rng: random.Random) -> dict[str, Any]:
    return {
        "order_id": rng.randint(10_000, 9_999_999),
        "customer": {"name": _words(rng, 1, 2).title(), "vip": rng.random() < 0.2},
        "lines": [
            {
                "sku": "".join(rng.choices(string.ascii_uppercase, k=3)) + str(rng.randint(1, 999)),
                "quantity": rng.randint(1, 20),
                "unit_price": round(rng.uniform(1, 500), 2),
            }
            for _ in range(rng.randint(1, 6))
        ],
        "status": rng.choice(("pending", "shipped", "returned")),
        "created_at": f"20{rng.randint(10, 25)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
    }


def _event(rng: random.Random) -> dict[str, Any]:
    return {
        "timestamp": rng.randint(1_500_000_000, 1_800_000_000),
        "level": rng.choice(("info", "warning", "error")),
        "logger": ".".join(rng.choices(_VOCABULARY, k=3)),
        "message": _words(rng, 4, 14),
        "context": {"attempt": rng.randint(1, 5), "duration_ms": round(rng.expovariate(0.01), 1)},
    }


def _flag(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(_VOCABULARY): rng.choice((True, False, None, rng.randint(0, 99)))}


_SHAPES: Final[tuple[Callable[[random.Random], dict[str, Any]], ...]] = (
    _order,
    _event,
    _flag,
)
