"""Prompts with known answers, generated when the bench runs; deterministic.

English: passages of Python's own documentation, among them the sentence with the answer. Other
languages: the facts of `bench.compressor.prompts`. Passages are separated in the ways that
retrieval does it, or only by blank lines.
"""

import importlib
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pydoc_data.topics import topics
from typing import Any, Final, Literal, NamedTuple

from bench.common.texts import ARABIC, CHINESE, HINDI, JAPANESE, RUSSIAN

# -- invented facts in seven languages, with a question in the language and one in English


# -- questions on documentation that ships with Python, and multi-hop questions on invented facts


class AskedSentence(NamedTuple):
    """A question and the beginning of the sentence that answers it."""

    source: str
    """A topic of `pydoc_data.topics`, or a module whose docstring it is."""
    gold: str
    question: str


class Hops(NamedTuple):
    """A question that needs two passages; the second is about what the first names."""

    first: str
    """Title, a bar, sentences; the one that is needed begins with a star."""
    second: str
    question: str


ENGLISH: Final = (
    AskedSentence("assignment", "A list of the remaining items in the iterable is then assigned", "When a starred target appears in an assignment, what does it receive?"),
    AskedSentence("async", 'Functions defined with "async def" syntax are always coroutine', "Is a function written with async def still a coroutine if it never awaits anything?"),
    AskedSentence("attribute-access", "The default behavior for attribute access is to get, set, or delete", "What happens by default when an attribute of an object is read or deleted?"),
    AskedSentence("attribute-access", 'The "__dir__" function should accept no arguments', "What must a module's __dir__ function return?"),
    AskedSentence("binary", "In the former case, the numbers are converted to a common type", "How are two numbers treated before they are multiplied?"),
    AskedSentence("calls", "Elements from these iterables are treated as if they were additional", "How does a call treat the elements of an unpacked iterable?"),
    AskedSentence("class", "The order in which attributes are defined in the class body is preserved", "Where is the order of definitions in a class body preserved?"),
    AskedSentence("compound", "If every key given in the mapping pattern is present in the subject", "When does a mapping pattern succeed?"),
    AskedSentence("compound", 'This means that multiple "except*" clauses can execute', "Can more than one except* clause run for the same exception group?"),
    AskedSentence("customization", "If this is not possible, a string of the form", "What should __repr__ return if no valid Python expression can be given?"),
    AskedSentence("customization", "This is typically used for debugging, so it is important", "Why should a representation be information-rich and unambiguous?"),
    AskedSentence("debugger", 'If you use the "silent" command in the command list', "Which pdb command suppresses the usual message about stopping at a breakpoint?"),
    AskedSentence("debugger", "The exclamation point can be omitted unless", "In the debugger, when may the exclamation point not be left out?"),
    AskedSentence("execmodel", 'The "except" clause is selected depending on the class', "What decides which except clause handles an exception?"),
    AskedSentence("formatstrings", "The replacement fields within the format_spec are substituted before", "Are nested replacement fields substituted before or after the format_spec is interpreted?"),
    AskedSentence("function", "A function call always assigns values to all parameters", "Where can the values of parameters mentioned in the parameter list come from?"),
    AskedSentence("identifiers", "These names are defined by the interpreter and its implementation", "Who defines the system-defined dunder names?"),
    AskedSentence("import", "When a module or package is contained within another package it is possible", "When may a relative import be used without mentioning the package name?"),
    AskedSentence("naming", "If a name is bound in a block, it is a local variable of that block", "When is a name that is bound in a block not a local variable?"),
    AskedSentence("numeric-types", "If a specific method is not defined, the augmented assignment falls back", "What do augmented assignments use if the in-place method is missing?"),
    AskedSentence("numeric-types", "If one of those methods does not support the operation with the supplied", "What should a numeric method return if it cannot handle the supplied arguments?"),
    AskedSentence("objects", "Do not depend on immediate finalization of objects", "Why should files always be closed explicitly?"),
    AskedSentence("operator-summary", "Note that comparisons, membership tests, and identity tests", "Which tests share the same precedence and chain from left to right?"),
    AskedSentence("operator-summary", 'The function "math.fmod()" returns a result whose sign', "Whose sign does the result of math.fmod have?"),
    AskedSentence("raise", "If it is a class, the exception instance will be obtained", "How is the instance obtained when raise is given an exception class?"),
    AskedSentence("sequence-types", 'Note: "for" loops expect that an "IndexError" will be raised', "Which exception lets a for loop detect the end of a sequence?"),
    AskedSentence("sequence-types", "This method should return a new iterator object", "What should a container's __iter__ method return?"),
    AskedSentence("specialnames", "A rich comparison method may return the singleton", "Which singleton may a rich comparison method return?"),
    AskedSentence("string-methods", "This means that characters like digraphs will only have", "What happens to digraphs when a string is capitalized?"),
    AskedSentence("string-methods", "This covers digits which cannot be used to form numbers in base 10", "Which ancient numbers are an example of digits that cannot form base 10 numbers?"),
    AskedSentence("string-methods", "Casefolding is similar to lowercasing but more aggressive", "How does casefolding differ from lowercasing?"),
    AskedSentence("strings", "New in version 3.3: Support for the unicode legacy literal", "In which version was the unicode legacy literal reintroduced?"),
    AskedSentence("try", "If an exception occurs in any of the clauses and is not handled", "What happens to an exception that no clause handles while finally still has to run?"),
    AskedSentence("types", "Python doesn’t have a char type; instead", "Does Python have a char type?"),
    AskedSentence("types", "A traceback object is implicitly created when an exception occurs", "When are traceback objects created implicitly?"),
    AskedSentence("typesmapping", "Iterating views while adding or deleting entries", "What can go wrong when entries are added to a dictionary during iteration over a view?"),
    AskedSentence("typesmapping", "An equality comparison between one", "What does comparing two dict.values() views for equality give?"),
    AskedSentence("typesmapping", "If a key occurs more than once, the last value", "If the same key occurs twice when a dictionary is built, which value wins?"),
    AskedSentence("typesseq", "Ranges do support negative indices", "How are negative indices of a range interpreted?"),
    AskedSentence("typesseq-mutable", 'The "reverse()" method modifies the sequence in place', "Why does reverse() work in place?"),
    AskedSentence("with", "If the return value was true, the exception is suppressed", "When does a with statement suppress an exception?"),
    AskedSentence("heapq", "These two make it possible to view the heap as a regular Python list", "Which element of the heap list is the smallest item?"),
    AskedSentence("random", "* The random() method is implemented in C", "Is random() threadsafe, and why?"),
    AskedSentence("csv", "csv.QUOTE_NONNUMERIC means that quotes are always placed", "Which csv constant places quotes around fields that do not parse as numbers?"),
    AskedSentence("difflib", "Function restore(delta, which)", "Which function gives back one of the two sequences behind an ndiff delta?"),
    AskedSentence("shelve", 'The difference with "dbm" databases', "How does a shelf differ from dbm databases?"),
    AskedSentence("copy", "- A deep copy constructs a new compound object and then, recursively", "What does a deep copy insert into the new compound object?"),
    AskedSentence("tokenize", "Additionally, all token lists start with an ENCODING token", "With which token does every token list start?"),
    AskedSentence("sched", "Each instance is parametrized with two functions", "Which two functions is a scheduler instance parametrized with?"),
    AskedSentence("configparser", "When `inline_comment_prefixes` is given", "What is inline_comment_prefixes used for?"),
    AskedSentence("urllib.request", "The HTTPRedirectHandler automatically deals with", "Which handler deals with HTTP 301 and 302 errors?"),
    AskedSentence("http.cookiejar", "This module has (now fairly distant) origins in", "Which Perl module did http.cookiejar descend from?"),
    AskedSentence("cmd", "The `completedefault' method may be overridden", "Which method can be overridden to intercept completions?"),
    AskedSentence("argparse", "- ArgumentError -- The exception raised by ArgumentParser", "Which exception do ArgumentParser objects raise for errors with the parser's actions?"),
    AskedSentence("subprocess", "This module allows you to spawn processes", "Which module lets you spawn processes and obtain their return codes?"),
)  # fmt: skip

HOPS: Final = (
    Hops("Tarnow Viaduct|The viaduct crosses the gorge in nine spans. *Its designer was the engineer Lucia Ferro. Trains have used it since 1904.", "Lucia Ferro|She studied hydraulics before turning to bridges. *Lucia Ferro was born in Oristano in 1871. Her drawings are kept in Cagliari.", "In which town was the engineer who designed the Tarnow Viaduct born?"),
    Hops("Blue Heron Quartet|The quartet recorded eleven albums. *Its cellist for twenty years was Marek Dolan. Critics praised the group's Haydn.", "Marek Dolan|He gave his first recital at fourteen. *Marek Dolan played an instrument made in Cremona in 1712. He retired to the coast.", "Which year was the instrument made that the cellist of the Blue Heron Quartet played?"),
    Hops("Kestrel Mine|The mine lies above the tree line. *The ore from Kestrel Mine was shipped through the port of Vellamo. Work stopped in winter.", "Vellamo|Fishing boats crowd the inner basin. *The harbour master of Vellamo in those years was Ida Strand. A lighthouse marks the reef.", "Who was harbour master of the port that shipped the ore of Kestrel Mine?"),
    Hops("The Glass Orchard|The novel has three narrators. *The Glass Orchard was translated into English by Noor Haddad. It won no prize at first.", "Noor Haddad|She wrote essays on Andalusian poetry. *Noor Haddad taught at the University of Leiden until 1998. She kept bees.", "At which university did the English translator of The Glass Orchard teach?"),
    Hops("Sable Island ferry|The ferry runs four times a day. *The vessel used on the Sable Island route is the Margit. Tickets are sold on board.", "Margit (ship)|The hull is painted green. *The Margit was built at the Halmstad yard in 1966. Her engines were replaced twice.", "At which yard was the ship of the Sable Island ferry built?"),
    Hops("Orlen Prize|The prize is given every second autumn. *In 2011 the Orlen Prize went to the chemist Tomas Abel. The medal is silver.", "Tomas Abel|As a boy he collected minerals. *Tomas Abel discovered the pigment called veridian slate. He never patented it.", "Which pigment was discovered by the winner of the 2011 Orlen Prize?"),
    Hops("Fort Cassel|The fort guards the river's mouth. *The garrison of Fort Cassel was commanded by Captain Ruiz. Its cannons are gone.", "Captain Ruiz|He came from a family of printers. *Captain Ruiz later wrote a treatise on tides. It was reprinted often.", "On which subject did the commander of Fort Cassel later write?"),
    Hops("Hollin Observatory|The dome turns on cannonballs. *The main telescope of Hollin Observatory was paid for by Agnes Wray. It was installed in 1881.", "Agnes Wray|She inherited a wool mill. *Agnes Wray made her fortune with waterproof cloth. A street bears her name.", "With what did the donor of the Hollin Observatory telescope make her fortune?"),
    Hops("Pavonia Marathon|The course follows the old canal. *The first Pavonia Marathon was won by Elio Brandt. Water is handed out every five kilometres.", "Elio Brandt|He trained on mountain paths. *Elio Brandt worked as a postman in Lugano. His shoes are in the museum.", "What was the occupation of the winner of the first Pavonia Marathon?"),
    Hops("Willow Street Bakery|The bakery opens at five. *The rye recipe of Willow Street Bakery came from Hanne Moller. People queue on Saturdays.", "Hanne Moller|She arrived with two suitcases. *Hanne Moller learned baking in Odense from her uncle. She disliked raisins.", "In which city did the woman behind the Willow Street Bakery rye recipe learn baking?"),
    Hops("Amber Codex|The codex has 212 leaves. *The Amber Codex was restored by Giulia Penn. Its binding is modern.", "Giulia Penn|She worked with brushes of three hairs. *Giulia Penn kept her laboratory in an abandoned chapel in Siena. Students came from abroad.", "Where was the laboratory of the restorer of the Amber Codex?"),
    Hops("Lake Orsa regatta|The regatta is held in June. *The regatta's silver cup on Lake Orsa was donated by the Velde brewery. Sails must be white.", "Velde brewery|The brewery uses spring water. *The Velde brewery was founded by two sisters in 1839. It employs sixty people.", "Who founded the brewery that donated the cup of the Lake Orsa regatta?"),
)  # fmt: skip


class Fact(NamedTuple):
    """A passage, its question, and the question in English."""

    passage: str
    question: str
    english: str


SPANISH: Final = (
    Fact("Faro de Punta Alba|El faro se levanta sobre un acantilado de granito. *La torre fue construida en 1892 por el ingeniero Ramiro Sáenz. Desde 1975 funciona de manera automática. Los visitantes pueden subir los sábados.", "¿Quién construyó la torre del faro de Punta Alba?", "Who built the tower of the Punta Alba lighthouse?"),
    Fact("Queso de Valdeoro|El queso se elabora con leche cruda de oveja. Las ruedas pesan unos tres kilos. *Debe madurar al menos nueve meses en cuevas naturales. Se vende sobre todo en otoño.", "¿Cuántos meses debe madurar el queso de Valdeoro?", "How many months must Valdeoro cheese mature?"),
    Fact("Tranvía de Miralta|La línea recorre doce kilómetros junto al río. *Los coches actuales se compraron en Lisboa en 1998. El trayecto dura cuarenta minutos. Los domingos hay menos servicios.", "¿Dónde se compraron los coches del tranvía de Miralta?", "Where were the cars of the Miralta tram bought?"),
    Fact("Biblioteca Inés Cano|La biblioteca ocupa un antiguo convento. Guarda ochenta mil volúmenes. *Su pieza más valiosa es un atlas náutico de 1571. La sala de lectura cierra a las nueve.", "¿Cuál es la pieza más valiosa de la Biblioteca Inés Cano?", "What is the most valuable piece of the Inés Cano library?"),
    Fact("Parque de los Tilos|El parque tiene tres estanques. *Los patos del estanque mayor proceden de Polonia. En verano se organizan conciertos. Está prohibido acampar.", "¿De qué país proceden los patos del Parque de los Tilos?", "Which country do the ducks of Parque de los Tilos come from?"),
    Fact("Volcán Huarán|El volcán alcanza los cinco mil metros. *Su última erupción registrada ocurrió en marzo de 1911. En la ladera norte crecen orquídeas. Los guías viven en el pueblo de abajo.", "¿Cuándo ocurrió la última erupción del volcán Huarán?", "When was the last eruption of the Huarán volcano?"),
    Fact("Cooperativa textil Aurora|La cooperativa reúne a doscientas tejedoras. Exportan mantas a cuatro continentes. *El tinte azul se obtiene de una planta llamada jiquilite. Las ganancias se reparten cada año.", "¿De qué planta se obtiene el tinte azul de la cooperativa Aurora?", "From which plant does the Aurora cooperative get its blue dye?"),
    Fact("Puente del Zorro|El puente tiene siete arcos desiguales. *Una riada destruyó dos de sus arcos en 1783. Hoy solo lo cruzan peatones. De noche se ilumina con faroles.", "¿Qué destruyó dos arcos del Puente del Zorro?", "What destroyed two arches of the Puente del Zorro?"),
)  # fmt: skip
GERMAN: Final = (
    Fact("Mühle Altenbrück|Die Mühle steht am Ende des Dorfes. *Ihr Wasserrad wurde 1846 aus Lärchenholz gebaut. Heute wird dort Strom erzeugt. Führungen gibt es im Mai.", "Aus welchem Holz wurde das Wasserrad der Mühle Altenbrück gebaut?", "From which wood was the water wheel of the Altenbrück mill built?"),
    Fact("Stadtarchiv Norden|Das Archiv verwahrt Urkunden aus acht Jahrhunderten. Viele davon sind auf Pergament geschrieben. *Der Lesesaal ist donnerstags bis zwanzig Uhr geöffnet. Fotografieren ist gegen Gebühr erlaubt.", "Wie lange ist der Lesesaal des Stadtarchivs Norden donnerstags geöffnet?", "Until when is the reading room of the Norden archive open on Thursdays?"),
    Fact("Seilbahn Hochkar|Die Seilbahn überwindet neunhundert Höhenmeter. *Bei Windgeschwindigkeiten über siebzig Stundenkilometern wird der Betrieb eingestellt. Eine Kabine fasst zwölf Personen. Hunde fahren kostenlos.", "Ab welcher Windgeschwindigkeit wird der Betrieb der Seilbahn Hochkar eingestellt?", "Above which wind speed does the Hochkar cable car stop?"),
    Fact("Orchester Elbwinkel|Das Orchester wurde von Lehrern gegründet. Es probt in einer ehemaligen Schule. *Die erste Geige spielt seit 2014 Frieda Lohmann. Jedes Jahr gibt es eine Reise ins Ausland.", "Wer spielt im Orchester Elbwinkel die erste Geige?", "Who plays first violin in the Elbwinkel orchestra?"),
    Fact("Moorbad Grünau|Das Bad nutzt Torf aus der Umgebung. *Eine Kur dauert gewöhnlich achtzehn Tage. Die Quelle wurde zufällig entdeckt. Im Park stehen alte Buchen.", "Wie viele Tage dauert eine Kur im Moorbad Grünau?", "How many days does a cure at Moorbad Grünau last?"),
    Fact("Werft Carstens|Auf der Werft arbeiten neunzig Menschen. Gebaut werden vor allem Fähren. *Den größten Auftrag erhielt sie 1987 aus Norwegen. Das Trockendock ist zweihundert Meter lang.", "Aus welchem Land kam der größte Auftrag der Werft Carstens?", "From which country did the Carstens yard get its largest order?"),
    Fact("Apfelsorte Rotperle|Die Sorte reift spät und hält lange. *Gezüchtet wurde sie von der Gärtnerin Ottilie Brand. Der Geschmack ist säuerlich. Sie eignet sich gut für Kuchen.", "Von wem wurde die Apfelsorte Rotperle gezüchtet?", "Who bred the Rotperle apple?"),
    Fact("Sternwarte Kahlberg|Die Kuppel hat acht Meter Durchmesser. Nachts ist das Gelände gesperrt. *Entdeckt wurde dort 1931 ein Komet mit grünem Schweif. Der Verein zählt dreihundert Mitglieder.", "Was wurde 1931 in der Sternwarte Kahlberg entdeckt?", "What was discovered at the Kahlberg observatory in 1931?"),
)  # fmt: skip
CHINESE_FACTS: Final = (
    Fact("青石桥|青石桥横跨在清水河上，全长八十米。*这座桥由石匠周德明于一七四三年主持修建。桥上刻有狮子和莲花。每年端午节这里都会举行龙舟比赛。", "青石桥是由谁主持修建的？", "Who directed the building of the Qingshi bridge?"),
    Fact("云岭茶场|云岭茶场位于海拔一千二百米的山坡上。茶叶全部由人工采摘。*头茬春茶通常在清明前五天开始采摘。茶场每年接待两万名游客。", "云岭茶场的头茬春茶什么时候开始采摘？", "When does the first spring picking start at the Yunling tea farm?"),
    Fact("海星图书馆|海星图书馆去年完成了扩建。*新馆的地下一层收藏着四千张老唱片。读者可以免费借阅十本书。周一闭馆整理。", "海星图书馆新馆地下一层收藏着什么？", "What is kept on the basement floor of the Haixing library?"),
    Fact("石榴电影节|石榴电影节每两年举办一次。评委来自十个国家。*第七届的最佳影片是讲述渔民生活的《潮汐》。颁奖典礼在老剧院举行。", "第七届石榴电影节的最佳影片是哪一部？", "Which film won at the seventh Shiliu film festival?"),
    Fact("长风风电场|长风风电场建在戈壁滩边缘。*它的九十台风机每年可以满足三十万户家庭的用电。维护人员住在附近的小镇。风机叶片长达六十米。", "长风风电场每年可以满足多少户家庭的用电？", "How many households can the Changfeng wind farm supply each year?"),
    Fact("白鹭湿地|白鹭湿地是候鸟的重要停歇地。园内禁止使用无人机。*科研人员在这里首次记录到黑脸琵鹭筑巢。木栈道全长三公里。", "科研人员在白鹭湿地首次记录到什么鸟筑巢？", "Which bird was first recorded nesting in the Bailu wetland?"),
    Fact("陶然陶瓷厂|陶然陶瓷厂创办于上世纪五十年代。*厂里最有名的产品是一种淡紫色的釉面茶壶。烧制一窑需要三十个小时。工人大多是本地人。", "陶然陶瓷厂最有名的产品是什么？", "What is the most famous product of the Taoran ceramics factory?"),
    Fact("双塔医院|双塔医院有六百张病床。门诊每天接待三千人。*急诊科在去年引进了移动式扫描设备。医院后面有一座花园。", "双塔医院急诊科去年引进了什么设备？", "Which equipment did the Shuangta hospital emergency department introduce?"),
)  # fmt: skip
JAPANESE_FACTS: Final = (
    Fact("白浜灯台|白浜灯台は岬の先端に立っている。*この灯台は明治三十二年に技師の森田清によって設計された。高さは二十五メートルである。周辺には遊歩道が整備されている。", "白浜灯台は誰によって設計されましたか。", "Who designed the Shirahama lighthouse?"),
    Fact("若葉豆腐店|若葉豆腐店は商店街の角にある。店主は三代目だ。*豆腐に使う大豆はすべて北海道の契約農家から仕入れている。朝六時には行列ができる。", "若葉豆腐店の大豆はどこから仕入れていますか。", "Where do the soybeans of the Wakaba tofu shop come from?"),
    Fact("霧山鉄道|霧山鉄道は全長十八キロの単線である。*最も急な勾配は終点の手前にある六十六パーミルの区間だ。秋には紅葉を見る客で混み合う。車両は赤く塗られている。", "霧山鉄道の最も急な勾配はどこにありますか。", "Where is the steepest grade of the Kiriyama railway?"),
    Fact("星野天文台|星野天文台は標高千四百メートルにある。一般公開は月に二回である。*二〇〇九年にはここで新しい小惑星が見つかった。駐車場は無料で使える。", "星野天文台では二〇〇九年に何が見つかりましたか。", "What was found at the Hoshino observatory in 2009?"),
    Fact("青木酒造|青木酒造は二百年の歴史をもつ。*仕込みには裏山の湧き水だけを使う。蔵の見学は冬に限られる。製品の半分は海外へ輸出される。", "青木酒造の仕込みには何を使いますか。", "Which water does the Aoki brewery use?"),
    Fact("花見川動物園|花見川動物園には百種の動物がいる。入園料は三百円である。*人気者のカピバラは毎年一月に柚子湯に入る。園内にはカフェもある。", "花見川動物園のカピバラは一月に何に入りますか。", "What does the capybara of the Hanamigawa zoo bathe in?"),
    Fact("月見橋|月見橋は木造の太鼓橋である。*現在の橋は一九六四年の洪水のあとに架け替えられた。欄干には兎の彫刻がある。夜は灯籠がともる。", "月見橋の現在の橋はいつ架け替えられましたか。", "When was the present Tsukimi bridge rebuilt?"),
    Fact("緑丘高校合唱部|緑丘高校の合唱部は四十人で活動している。練習は毎日行われる。*昨年の全国大会では銀賞を受賞した。指揮者は音楽の先生である。", "緑丘高校合唱部は昨年の全国大会で何を受賞しましたか。", "Which award did the Midorigaoka choir win?"),
)  # fmt: skip
RUSSIAN_FACTS: Final = (
    Fact("Маяк Северный|Маяк стоит на скалистом острове. *Башню построил в 1867 году инженер Павел Громов. Смотритель живёт там только летом. Свет виден за двадцать миль.", "Кто построил башню маяка Северный?", "Who built the tower of the Severny lighthouse?"),
    Fact("Музей часов|В музее собрано более тысячи часов. Экскурсии начинаются каждый час. *Самый старый экспонат был изготовлен в Нюрнберге. По понедельникам музей закрыт.", "Где был изготовлен самый старый экспонат Музея часов?", "Where was the oldest exhibit of the clock museum made?"),
    Fact("Колхоз Рассвет|Хозяйство выращивает лён и рожь. *Урожай льна в прошлом году составил восемьсот тонн. Новые тракторы купили весной. В посёлке построили школу.", "Сколько тонн составил урожай льна в колхозе Рассвет?", "How many tonnes of flax did the Rassvet farm harvest?"),
    Fact("Театр на Набережной|Труппа насчитывает тридцать актёров. Здание пережило два пожара. *Занавес для сцены вышила художница Вера Лапина. Премьеры проходят осенью.", "Кто вышил занавес для Театра на Набережной?", "Who embroidered the curtain of the embankment theatre?"),
    Fact("Озеро Чистое|Озеро лежит среди сосновых лесов. *Его наибольшая глубина достигает ста двенадцати метров. Зимой здесь ловят рыбу. На берегу работает турбаза.", "Какова наибольшая глубина озера Чистое?", "What is the greatest depth of lake Chistoye?"),
    Fact("Завод Прогресс|Завод выпускает насосы и клапаны. На нём трудятся пятьсот человек. *Первую партию насосов отправили заказчику в Монголию. Цеха отапливаются газом.", "Куда завод Прогресс отправил первую партию насосов?", "Where did the Progress plant send its first pumps?"),
    Fact("Экспедиция Зимина|Экспедиция вышла из порта в июне. *В пути исследователи открыли пролив, названный именем штурмана. Продовольствия хватило на год. Дневники хранятся в архиве.", "Что открыли исследователи экспедиции Зимина?", "What did the Zimin expedition discover?"),
    Fact("Пекарня Колос|Пекарня открывается в шесть утра. Хлеб пекут по старым рецептам. *Закваску для ржаного хлеба хранят с 1953 года. Рядом есть детская площадка.", "С какого года в пекарне Колос хранят закваску?", "Since which year has the Kolos bakery kept its sourdough?"),
)  # fmt: skip
ARABIC_FACTS: Final = (
    Fact("منارة الرأس|تقع المنارة على طرف صخري من الساحل. *بنى البرج المهندس سليم الحداد في عام 1889. يصل ضوؤها إلى عشرين ميلا. يزورها السياح في الصيف.", "من بنى برج منارة الرأس؟", "Who built the tower of the Ras lighthouse?"),
    Fact("سوق النحاسين|يضم السوق ستين دكانا صغيرا. *تصنع الأباريق هناك من نحاس يستورد من قبرص. يغلق السوق عند المغرب. تنتشر المقاهي حوله.", "من أين يستورد نحاس الأباريق في سوق النحاسين؟", "From where is the copper of the coppersmiths' market imported?"),
    Fact("مكتبة النور|تأسست المكتبة قبل تسعين عاما. تضم قاعة كبيرة للقراءة. *أندر مخطوطاتها كتاب في الفلك نسخ بمدينة فاس. الدخول مجاني للطلاب.", "ما أندر مخطوطات مكتبة النور؟", "What is the rarest manuscript of the Nour library?"),
    Fact("واحة السدر|تحيط الكثبان بالواحة من كل جانب. *يروي الفلاحون نخيلهم من سبع عيون قديمة. يقام مهرجان للتمور في الخريف. البيوت مبنية من الطين.", "من أين يروي الفلاحون نخيلهم في واحة السدر؟", "From what do the farmers of Sidr oasis water their palms?"),
    Fact("مستشفى الأمل|يعمل في المستشفى مئتا طبيب. *افتتح قسم جراحة القلب في عام 2006 بدعم من متبرعين. تحيط به حديقة واسعة. مواعيد الزيارة مسائية.", "متى افتتح قسم جراحة القلب في مستشفى الأمل؟", "When did the heart surgery department of Amal hospital open?"),
    Fact("مصنع الزيتون|يعصر المصنع الزيت في الشتاء. عدد عماله خمسون. *يحفظ الزيت في جرار فخارية مدفونة تحت الأرض. تباع المنتجات في المدن القريبة.", "أين يحفظ الزيت في مصنع الزيتون؟", "Where does the olive plant store its oil?"),
    Fact("قلعة الصقر|شيدت القلعة فوق تل مرتفع. لها أربعة أبراج. *تضرر سورها الشرقي بسبب زلزال وقع عام 1759. يجري ترميمها حاليا.", "ما الذي أضر بسور قلعة الصقر الشرقي؟", "What damaged the eastern wall of Saqr castle?"),
    Fact("فرقة الأندلس|تتكون الفرقة من عشرين عازفا. *تعزف على العود فيها الموسيقية هدى البناني. سجلت الفرقة ستة ألبومات. تتدرب كل خميس.", "من تعزف على العود في فرقة الأندلس؟", "Who plays the oud in the Andalus ensemble?"),
)  # fmt: skip
HINDI_FACTS: Final = (
    Fact("नीलम बाँध|यह बाँध पहाड़ियों के बीच बना है। *इसका नक्शा इंजीनियर विमल जोशी ने 1958 में तैयार किया था। बाँध से तीन ज़िलों को पानी मिलता है। यहाँ नौका विहार भी होता है।", "नीलम बाँध का नक्शा किसने तैयार किया था?", "Who drew the plans of the Neelam dam?"),
    Fact("चंदन पुस्तकालय|पुस्तकालय शहर के पुराने हिस्से में है। इसमें चालीस हज़ार किताबें हैं। *सबसे पुरानी पांडुलिपि ताड़ के पत्तों पर लिखी गई है। रविवार को छुट्टी रहती है।", "चंदन पुस्तकालय की सबसे पुरानी पांडुलिपि किस पर लिखी गई है?", "On what is the oldest manuscript of the Chandan library written?"),
    Fact("सूरजपुर मेला|मेला हर साल सर्दियों में लगता है। *मेले का मुख्य आकर्षण ऊँटों की दौड़ होती है। दूर-दूर से व्यापारी आते हैं। रात में लोकगीत गाए जाते हैं।", "सूरजपुर मेले का मुख्य आकर्षण क्या है?", "What is the main attraction of the Surajpur fair?"),
    Fact("गंगोत्री चाय बागान|बागान ढलान पर फैला हुआ है। यहाँ तीन सौ लोग काम करते हैं। *सबसे महँगी चाय सफ़ेद कलियों से बनाई जाती है। बारिश में काम रुक जाता है।", "गंगोत्री चाय बागान की सबसे महँगी चाय किससे बनाई जाती है?", "From what is the most expensive tea of the Gangotri garden made?"),
    Fact("कमल रेलवे स्टेशन|स्टेशन पर चार प्लेटफ़ॉर्म हैं। *इसकी घड़ी 1911 में लंदन से मँगवाई गई थी। हर दिन साठ गाड़ियाँ गुज़रती हैं। बाहर एक बड़ा बाज़ार है।", "कमल रेलवे स्टेशन की घड़ी कहाँ से मँगवाई गई थी?", "From where was the clock of Kamal station ordered?"),
    Fact("हरियाली सहकारी समिति|समिति में पाँच सौ किसान हैं। *समिति ने पिछले साल सौर पंप ख़रीदने के लिए ऋण दिया। बैठक हर महीने होती है। बीज सस्ते मिलते हैं।", "हरियाली सहकारी समिति ने किसके लिए ऋण दिया?", "For what did the Hariyali cooperative give loans?"),
    Fact("मयूर संग्रहालय|संग्रहालय एक पुराने महल में है। टिकट बीस रुपये का है। *यहाँ का सबसे प्रसिद्ध चित्र एक नर्तकी का है। बच्चों के लिए अलग कक्ष है।", "मयूर संग्रहालय का सबसे प्रसिद्ध चित्र किसका है?", "Whom does the most famous painting of the Mayur museum show?"),
    Fact("शिखर विद्यालय|विद्यालय पहाड़ी गाँव में है। *यहाँ के बच्चों ने मौसम मापने का यंत्र बनाया। अध्यापक गाँव में ही रहते हैं। खेल का मैदान बड़ा है।", "शिखर विद्यालय के बच्चों ने क्या बनाया?", "What did the children of the Shikhar school build?"),
)  # fmt: skip

LANGUAGES: Final = {
    "Spanish": SPANISH,
    "German": GERMAN,
    "Chinese": CHINESE_FACTS,
    "Japanese": JAPANESE_FACTS,
    "Russian": RUSSIAN_FACTS,
    "Arabic": ARABIC_FACTS,
    "Hindi": HINDI_FACTS,
}


Place = Literal["start", "middle", "end"]
PLACES: Final[tuple[Place, ...]] = ("start", "middle", "end")
Kind = Literal["qa", "multi-hop", "cross-lingual"]
Messages = list[dict[str, Any]]

_SYSTEM: Final = "Answer the question from the passages. Say so if they do not hold the answer."
_PASSAGE_CHARS: Final = (500, 1400)
PROMPT_CHARS: Final = (38_000, 52_000)
"""8K to 12K tokens of English."""
_FORMS: Final = ("number", "document", "tag", "heading", "blank")
_FILLER: Final = {
    "Chinese": CHINESE,
    "Japanese": JAPANESE,
    "Russian": RUSSIAN,
    "Arabic": ARABIC,
    "Hindi": HINDI,
}


@dataclass(frozen=True, slots=True)
class PromptCase:
    """A prompt, and the sentences it cannot be answered without."""

    kind: Kind
    language: str
    place: Place
    messages: Messages
    gold: tuple[str, ...]
    form: str
    """How its passages are separated."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A titled text."""

    title: str
    text: str


def prompts() -> list[PromptCase]:
    """Every prompt: questions and answers in eight languages, multi-hop, cross-lingual."""
    return [*english(), *multi_hop(), *other_languages()]


def english(chars: tuple[int, int] = PROMPT_CHARS) -> list[PromptCase]:
    """Each English question with its passage at three places, among `chars` of others."""
    found = []
    rng = random.Random(1)
    forms = cycle(_FORMS)
    for asked in ENGLISH:
        located = _located(asked)
        if located is None:
            continue
        passage, gold = located
        for place in PLACES:
            others = _distractors(gold, rng, chars)
            wrap = rng.random() < 0.5
            form = next(forms)
            text = _laid_out([passage], others, place, form, asked.question, rng, wrap=wrap)
            messages = _messages(text, rng)
            found.append(PromptCase("qa", "English", place, messages, (gold,), form))
    return found


def multi_hop() -> list[PromptCase]:
    """Two passages are needed; the others' passages of the same kind stand between."""
    found = []
    rng = random.Random(2)
    forms = cycle(_FORMS)
    for hops in HOPS:
        near = [_fact(text) for other in HOPS if other is not hops for text in other[:2]]
        pairs = [_fact(hops.first), _fact(hops.second)]
        for place in PLACES:
            others = [*_distractors("", rng, PROMPT_CHARS), *(passage for passage, _ in near)]
            rng.shuffle(others)
            form = next(forms)
            text = _laid_out([p for p, _ in pairs], others, place, form, hops.question, rng)
            gold = tuple(sentence for _, sentence in pairs)
            messages = _messages(text, rng)
            found.append(PromptCase("multi-hop", "English", place, messages, gold, form))
    return found


def other_languages() -> list[PromptCase]:
    """Each fact asked for in its own language, and in English."""
    found = []
    rng = random.Random(3)
    forms = cycle(_FORMS)
    for language, facts in LANGUAGES.items():
        for fact in facts:
            passage, gold = _fact(fact.passage)
            others = [_fact(other.passage)[0] for other in facts if other is not fact]
            others += _filler(language, rng)
            for place in PLACES:
                rng.shuffle(others)
                form = next(forms)
                asked: tuple[tuple[Kind, str], ...] = (
                    ("qa", fact.question),
                    ("cross-lingual", fact.english),
                )
                for kind, question in asked:
                    text = _laid_out([passage], others, place, form, question, rng)
                    messages = _messages(text, rng)
                    found.append(PromptCase(kind, language, place, messages, (gold,), form))
    return found


def _filler(language: str, rng: random.Random) -> list[Passage]:
    """Passages of sentences that answer nothing."""
    sentences = list(_FILLER.get(language, ()))
    rng.shuffle(sentences)
    joiner = "" if language in {"Chinese", "Japanese"} else " "
    return [
        Passage(sentences[at][:8].strip(), joiner.join(sentences[at : at + 4]))
        for at in range(0, len(sentences) - 3, 4)
    ]


def _fact(text: str) -> tuple[Passage, str]:
    """The passage without its star, and the sentence that has it."""
    title, _, body = text.partition("|")
    at = body.index("*")
    stop = re.compile(r"[.।](?=\s|$)|。").search(body, at)
    end = stop.end() if stop else len(body)
    return Passage(title, body.replace("*", "")), body[at + 1 : end]


def _messages(text: str, rng: random.Random) -> Messages:
    messages = [{"role": "user", "content": text}]
    return [{"role": "system", "content": _SYSTEM}, *messages] if rng.random() < 0.5 else messages


def _laid_out(
    gold: list[Passage],
    others: list[Passage],
    place: Place,
    form: str,
    question: str,
    rng: random.Random,
    *,
    wrap: bool = False,
) -> str:
    """The user message: passages with the gold ones in a third of them, then the question."""
    third = len(others) / 3
    low = PLACES.index(place) * third
    passages = list(others)
    for passage in gold:
        passages.insert(int(low + rng.random() * third), passage)
    texts = []
    for number, passage in enumerate(passages, 1):
        text = _wrapped(passage.text) if wrap else passage.text
        texts.append(_headed(form, number, passage.title, text))
    return "\n\n".join([*texts, f"Question: {question}" if rng.random() < 0.5 else question])


def _headed(form: str, number: int, title: str, text: str) -> str:
    match form:
        case "number":
            return f"[{number}] {title}\n{text}"
        case "document":
            return f"Document [{number}](Title: {title}) {text}"
        case "tag":
            return f'<document id="{number}" title="{title}">\n{text}\n</document>'
        case "heading":
            return f"### {title}\n{text}"
    return text


def _wrapped(text: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, 79) for paragraph in text.split("\n\n"))


@cache
def _pages() -> dict[str, tuple[str, ...]]:
    """Paragraphs of each source, white space collapsed."""
    names = {asked.source for asked in ENGLISH}
    texts = {name: text for name, text in topics.items() if name in names or len(text) > 3000}
    for name in names - set(texts):
        texts[name] = importlib.import_module(name).__doc__ or ""
    return {name: tuple(_paragraphs(text)) for name, text in sorted(texts.items())}


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n[ \t]*\n", text):
        joined = " ".join(paragraph.split())
        # Grammar, tables and examples are no passages that retrieval would bring.
        if len(joined) > 60 and not set("|`+").intersection(joined[:3]) and ">>>" not in joined:
            yield joined


def _located(asked: AskedSentence) -> tuple[Passage, str] | None:
    """The passage around the answer and the answer; None when this Python has it not."""
    paragraphs = _pages().get(asked.source, ())
    wanted = " ".join(asked.gold.split())
    for index, paragraph in enumerate(paragraphs):
        at = paragraph.find(wanted)
        if at < 0:
            continue
        stop = re.compile(r"[.](?=\s|$)").search(paragraph, at + len(wanted))
        gold = paragraph[at : stop.end() if stop else len(paragraph)]
        text = paragraph
        if index + 1 < len(paragraphs) and len(text) < _PASSAGE_CHARS[0]:
            text = f"{text}\n\n{paragraphs[index + 1]}"
        if index and len(text) < _PASSAGE_CHARS[0]:
            text = f"{paragraphs[index - 1]}\n\n{text}"
        return Passage(asked.source.replace("-", " ").title(), text), gold
    return None


def _distractors(gold: str, rng: random.Random, chars: tuple[int, int]) -> list[Passage]:
    """Passages without the answer, of `chars` together."""
    pages = _pages()
    names = list(pages)
    rest = rng.randint(*chars)
    seen: set[tuple[str, int]] = set()
    found = []
    while rest > 0:
        name = rng.choice(names)
        if not pages[name]:
            continue
        at = rng.randrange(len(pages[name]))
        wanted = rng.randint(*_PASSAGE_CHARS)
        text = ""
        while at < len(pages[name]) and len(text) < wanted and (name, at) not in seen:
            seen.add((name, at))
            paragraph = pages[name][at]
            if not gold or gold not in paragraph:
                text += ("\n\n" if text else "") + paragraph
            at += 1
        if text:
            found.append(Passage(name.replace("-", " ").title(), text[:3000]))
            rest -= len(text)
        elif len(seen) > 3000:
            break
    return found
