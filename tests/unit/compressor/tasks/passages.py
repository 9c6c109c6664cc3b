"""Passages as retrieval brings them, each with a question and the sentence that answers it."""

from typing import NamedTuple


class Fact(NamedTuple):
    """A passage; `answer` stands in its text."""

    title: str
    text: str
    question: str
    answer: str


ENGLISH = [
    Fact(
        "Copper roofs",
        "Copper roofs turn green within thirty years. The colour comes from salts that form in "
        "rain and sea air. Near the coast the change is faster than inland. Roofers cut the sheets "
        "with shears and fold the seams by hand. A well folded seam needs no solder at all.",
        "How long do copper roofs take to turn green?",
        "Copper roofs turn green within thirty years.",
    ),
    Fact(
        "The mail plane of 1934",
        "The first mail plane to the islands flew in June 1934. Its pilot was Edith Marlow, who "
        "had learned to fly on crop dusters. She carried two sacks of letters and a spare magneto. "
        "On the way back a storm forced her down on a beach. Fishermen towed the plane to harbour.",
        "Who was the pilot of the first mail plane to the islands?",
        "Its pilot was Edith Marlow, who had learned to fly on crop dusters.",
    ),
    Fact(
        "Barn owls",
        "Barn owls hunt over meadows at dusk. Their ears sit at different heights, so that they "
        "can tell where a sound comes from. A pair with young needs about thirty voles a night. "
        "They nest in lofts, hollow trees and church towers. Hard winters halve their number.",
        "How many voles does a pair of barn owls need a night?",
        "A pair with young needs about thirty voles a night.",
    ),
    Fact(
        "Sourdough",
        "A sourdough starter is fed with flour and water every day. Wild yeasts and bacteria live "
        "in it side by side. In a cool kitchen it works slowly and tastes sharper. Bakers in Genzano "
        "keep a starter that is said to date from 1888. Rye flour wakes a tired starter best.",
        "Which flour wakes a tired starter?",
        "Rye flour wakes a tired starter best.",
    ),
    Fact(
        "The ferry Halcyon",
        "The ferry Halcyon crosses the sound eleven times a day. It carries forty cars and three "
        "hundred people. The engines were changed to batteries two winters ago. They are charged "
        "at the northern pier while the cars drive off. In fog the ferry waits for the pilot boat.",
        "Where are the batteries of the ferry Halcyon charged?",
        "They are charged at the northern pier while the cars drive off.",
    ),
    Fact(
        "Ink from oak galls",
        "Monks boiled oak galls with iron salts to make ink. Fresh ink is pale and darkens on the "
        "page within a day. Too much acid eats through parchment after some centuries. Restorers "
        "stop the decay with a bath of calcium phytate. The recipe was first printed in 1540.",
        "What do restorers use to stop the decay of oak gall ink?",
        "Restorers stop the decay with a bath of calcium phytate.",
    ),
    Fact(
        "Village clockmakers",
        "Clockmaking came to the valley with winter work on farms. Whole families cut wheels from "
        "beech and painted the dials. In 1850 the valley sold sixty thousand clocks a year. The "
        "school for makers was founded by the engineer Gerwig. Cuckoos were added much later.",
        "Who founded the school for clockmakers?",
        "The school for makers was founded by the engineer Gerwig.",
    ),
    Fact(
        "Deep wells",
        "The deepest well of the desert town reaches 412 metres. Its water is warm and has to be "
        "cooled before it goes to the gardens. A German firm drilled it in the seventies. The pump "
        "is driven by the sun now. Salt is taken out of the water in two steps.",
        "How deep is the well of the desert town?",
        "The deepest well of the desert town reaches 412 metres.",
    ),
    Fact(
        "Snow fences",
        "Snow fences stand forty paces from the road. They slow the wind so that drifts form "
        "behind them. Wooden slats with gaps work better than solid boards. Farmers are paid for "
        "the land that the fences take. After a mild winter the slats are turned.",
        "How far from the road do snow fences stand?",
        "Snow fences stand forty paces from the road.",
    ),
    Fact(
        "The blind piano tuner",
        "Louis Castel tuned the pianos of the opera for fifty years. He was blind from birth and "
        "knew each instrument by its smell. His tuning hammer lies in the museum of the conservatory. "
        "Apprentices had to close their eyes during lessons. He never used a fork.",
        "Where does the tuning hammer of Louis Castel lie?",
        "His tuning hammer lies in the museum of the conservatory.",
    ),
    Fact(
        "Terraces of slate",
        "The vineyards above the bend stand on terraces of slate. The stones hold the day's heat "
        "until midnight. Each wall has to be rebuilt every twenty years. Goats graze between the "
        "rows in early spring. The grape harvest is carried down on a rack railway.",
        "What carries the grape harvest down from the terraces?",
        "The grape harvest is carried down on a rack railway.",
    ),
    Fact(
        "Night trams",
        "Night trams were brought back after a vote in 2009. They run every half hour between one "
        "and five. The drivers receive a fifth more than by day. Bicycles ride free of charge after "
        "midnight. The line to the hospital is served by two cars.",
        "When may bicycles ride free on night trams?",
        "Bicycles ride free of charge after midnight.",
    ),
]
GERMAN = [
    Fact(
        "Die Glocke von Sankt Veit",
        "Die große Glocke von Sankt Veit wiegt vier Tonnen. Gegossen wurde sie von Meister Ulrich "
        "aus Kempten. Im Krieg lag sie in einem Stollen unter Heu. Seit dem Brand läutet sie nur an "
        "Feiertagen.",
        "Von wem wurde die große Glocke von Sankt Veit gegossen?",
        "Gegossen wurde sie von Meister Ulrich aus Kempten.",
    ),
    Fact(
        "Seilbahn am Hohen Stein",
        "Die Seilbahn am Hohen Stein fährt seit dreißig Jahren. Ihre Kabinen sind rot und fassen "
        "acht Gäste. Bei Wind über sechzig Kilometern in der Stunde steht sie still. Der Strom kommt "
        "aus dem eigenen Wasserrad.",
        "Woher kommt der Strom der Seilbahn am Hohen Stein?",
        "Der Strom kommt aus dem eigenen Wasserrad.",
    ),
    Fact(
        "Bienen auf dem Rathaus",
        "Auf dem Dach des Rathauses stehen neun Völker. Der Imker kommt jeden Freitag mit dem "
        "Fahrrad. Im letzten Sommer gab es achtzig Gläser Lindenhonig. Die Gläser bekommen Paare zur "
        "Hochzeit geschenkt.",
        "Wie viele Gläser Lindenhonig gab es im letzten Sommer?",
        "Im letzten Sommer gab es achtzig Gläser Lindenhonig.",
    ),
    Fact(
        "Das Salzbergwerk",
        "Im Salzbergwerk herrschen das ganze Jahr elf Grad. Die Besucher rutschen auf langen Bänken "
        "in die Tiefe. Ein Chor singt im Advent in der unteren Halle. Das Holz der Stützen ist hart "
        "wie Stein geworden.",
        "Wie viel Grad herrschen im Salzbergwerk?",
        "Im Salzbergwerk herrschen das ganze Jahr elf Grad.",
    ),
]
CHINESE = [
    Fact(
        "石桥",
        "城南的石桥建于明朝末年，桥上有二十一只石狮子。修桥的钱是一位盐商捐的。桥下的水在冬天不结冰。每年端午，龙舟从桥下出发。",
        "修石桥的钱是谁捐的？",
        "修桥的钱是一位盐商捐的。",
    ),
    Fact(
        "竹纸",
        "山村里的竹纸要做七十二道工序。嫩竹在石灰水里泡一百天。晒纸的墙用糯米浆刷过。写族谱的人只肯用这种纸。",
        "嫩竹在石灰水里泡多少天？",
        "嫩竹在石灰水里泡一百天。",
    ),
    Fact(
        "灯塔",
        "东岛的灯塔高三十六米，灯光能照到二十海里以外。守塔人每月换一次班。补给船在大风天不能靠岸。塔里养着两只猫。",
        "东岛的灯塔有多高？",
        "东岛的灯塔高三十六米，灯光能照到二十海里以外。",
    ),
    Fact(
        "夜市",
        "火车站后面的夜市晚上六点开始。最老的摊子卖的是糖炒栗子。摊主用的铁锅是祖父留下的。下雪的时候他会多给半斤。",
        "夜市最老的摊子卖什么？",
        "最老的摊子卖的是糖炒栗子。",
    ),
]
RUSSIAN = [
    Fact(
        "Старая мельница",
        "Старая мельница стоит на реке Тосне с 1847 года. Её построил купец Саврасов. Колесо "
        "меняли четыре раза. Теперь в ней пекут хлеб для школы.",
        "Какой купец построил старую мельницу?",
        "Её построил купец Саврасов.",
    ),
    Fact(
        "Паром через залив",
        "Паром через залив ходит с мая по октябрь. Он берёт двадцать машин и один автобус. Капитан "
        "живёт на борту вместе с собакой. Билеты продают в аптеке.",
        "Где продают билеты на паром через залив?",
        "Билеты продают в аптеке.",
    ),
    Fact(
        "Яблони монастыря",
        "В саду монастыря растут яблони ста сорока сортов. Самый редкий сорт назвали в честь "
        "садовника Ефима. Черенки хранят в леднике. Осенью устраивают ярмарку.",
        "Где хранят черенки яблони?",
        "Черенки хранят в леднике.",
    ),
    Fact(
        "Часы на вокзале",
        "Часы на вокзале отстают ровно на две минуты. Так решил начальник станции после жалоб "
        "опоздавших. Механизм привезли из Женевы. Заводят его по субботам.",
        "Откуда привезли механизм часов на вокзале?",
        "Механизм привезли из Женевы.",
    ),
]
