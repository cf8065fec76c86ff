"""The closed world: a dozen countries, ten animals, eight things, and how people speak about them in two languages."""

from collections.abc import Mapping
from dataclasses import dataclass

LANGUAGES = ("zh", "en")


@dataclass(frozen=True, slots=True)
class Wording:
    """Templates of one relation in one language over {s} (subject) and {v} (value), {t} and {w} for a second pair.

    `answer` is the one good answer: exact match against it is a fair measure. Every answer has at least 9 characters.
    """

    questions: tuple[str, ...]
    answer: str
    statements: tuple[str, ...]
    pair_question: str
    pair_answer: str
    thought: str


@dataclass(frozen=True, slots=True)
class Relation:
    """What is asked about one kind of subject; `values` maps subject to value, per language."""

    name: str
    kind: str
    values: Mapping[str, Mapping[str, str]]
    wording: Mapping[str, Wording]


# en and zh of: name, capital, language, continent, currency.
_COUNTRIES = """
France 法国|Paris 巴黎|French 法语|Europe 欧洲|euro 欧元
China 中国|Beijing 北京|Chinese 汉语|Asia 亚洲|yuan 人民币
Japan 日本|Tokyo 东京|Japanese 日语|Asia 亚洲|yen 日元
Germany 德国|Berlin 柏林|German 德语|Europe 欧洲|euro 欧元
Italy 意大利|Rome 罗马|Italian 意大利语|Europe 欧洲|euro 欧元
Spain 西班牙|Madrid 马德里|Spanish 西班牙语|Europe 欧洲|euro 欧元
Russia 俄罗斯|Moscow 莫斯科|Russian 俄语|Europe 欧洲|ruble 卢布
Thailand 泰国|Bangkok 曼谷|Thai 泰语|Asia 亚洲|baht 泰铢
Egypt 埃及|Cairo 开罗|Arabic 阿拉伯语|Africa 非洲|pound 埃镑
Kenya 肯尼亚|Nairobi 内罗毕|Swahili 斯瓦希里语|Africa 非洲|shilling 先令
Brazil 巴西|Brasilia 巴西利亚|Portuguese 葡萄牙语|America 美洲|real 雷亚尔
Canada 加拿大|Ottawa 渥太华|English 英语|America 美洲|dollar 加元
"""
# name, legs, class, food, sound ("-": none worth asking about).
_ANIMALS = """
dog 狗|4 4|mammal 哺乳动物|bones 骨头|woof 汪汪
cat 猫|4 4|mammal 哺乳动物|mice 老鼠|meow 喵喵
cow 牛|4 4|mammal 哺乳动物|grass 青草|moo 哞哞
sheep 羊|4 4|mammal 哺乳动物|leaves 树叶|baa 咩咩
lion 狮子|4 4|mammal 哺乳动物|meat 肉|roar 吼吼
duck 鸭子|2 2|bird 鸟类|worms 虫子|quack 嘎嘎
hen 母鸡|2 2|bird 鸟类|corn 玉米|cluck 咯咯
frog 青蛙|4 4|amphibian 两栖动物|flies 苍蝇|croak 呱呱
bee 蜜蜂|6 6|insect 昆虫|honey 花蜜|buzz 嗡嗡
ant 蚂蚁|6 6|insect 昆虫|sugar 糖|- -
"""
# name, colour, kind.
_THINGS = """
apple 苹果|red 红色|fruit 水果
banana 香蕉|yellow 黄色|fruit 水果
carrot 胡萝卜|orange 橙色|vegetable 蔬菜
eggplant 茄子|purple 紫色|vegetable 蔬菜
milk 牛奶|white 白色|drink 饮料
coffee 咖啡|brown 棕色|drink 饮料
rose 玫瑰|red 红色|flower 花
salt 食盐|white 白色|mineral 矿物
"""

_WORDING: dict[str, dict[str, Wording]] = {
    "capital": {
        "en": Wording(
            ("What is the capital of {s}?", "Which city is the capital of {s}?", "Name the capital of {s}."),
            "The capital of {s} is {v}.",
            ("{v} is the capital of {s}.", "The capital city of {s} is called {v}."),
            "What are the capitals of {s} and {t}?",
            "The capital of {s} is {v} and the capital of {t} is {w}.",
            "The user asks for the capital of {s}.",
        ),
        "zh": Wording(
            ("{s}的首都是哪里？", "哪座城市是{s}的首都？", "请说出{s}的首都。"),
            "{s}的首都是{v}。",
            ("{v}是{s}的首都。", "{s}的首都叫{v}。"),
            "{s}和{t}的首都分别是哪里？",
            "{s}的首都是{v}，{t}的首都是{w}。",
            "用户想知道{s}的首都是哪座城市。",
        ),
    },
    "language": {
        "en": Wording(
            ("Which language do people speak in {s}?", "What do people in {s} speak?", "Name the language of {s}."),
            "People in {s} speak {v}.",
            ("{v} is the language of {s}.", "In {s} people speak {v}."),
            "Which languages do people speak in {s} and {t}?",
            "People in {s} speak {v} and people in {t} speak {w}.",
            "The user asks for the language of {s}.",
        ),
        "zh": Wording(
            ("{s}人说什么语言？", "在{s}人们讲什么话？", "请说出{s}的语言。"),
            "{s}人主要说{v}。",
            ("{v}是{s}的语言。", "在{s}人们说{v}。"),
            "{s}人和{t}人分别说什么语言？",
            "{s}人主要说{v}，{t}人主要说{w}。",
            "用户想知道{s}人说哪一种语言。",
        ),
    },
    "continent": {
        "en": Wording(
            ("Where is {s}?", "On which continent is {s}?", "Name the continent of {s}."),
            "{s} is a country in {v}.",
            ("{s} lies in {v}.", "The continent of {s} is {v}."),
            "Where are {s} and {t}?",
            "{s} is a country in {v} and {t} is a country in {w}.",
            "The user asks for the continent of {s}.",
        ),
        "zh": Wording(
            ("{s}在哪个洲？", "{s}位于哪里？", "请说出{s}所在的洲。"),
            "{s}是{v}的一个国家。",
            ("{s}在{v}。", "{s}位于{v}。"),
            "{s}和{t}分别在哪个洲？",
            "{s}是{v}的一个国家，{t}是{w}的一个国家。",
            "用户想知道{s}位于哪一个大洲。",
        ),
    },
    "currency": {
        "en": Wording(
            ("What is the currency of {s}?", "Which money is used in {s}?", "Name the currency of {s}."),
            "The currency of {s} is the {v}.",
            ("People in {s} pay with the {v}.", "In {s} the money is called {v}."),
            "What are the currencies of {s} and {t}?",
            "The currency of {s} is the {v} and the currency of {t} is the {w}.",
            "The user asks for the currency of {s}.",
        ),
        "zh": Wording(
            ("{s}的货币是什么？", "{s}用什么钱？", "请说出{s}的货币。"),
            "{s}的货币是{v}。",
            ("在{s}人们用{v}付钱。", "{s}的钱叫{v}。"),
            "{s}和{t}的货币分别是什么？",
            "{s}的货币是{v}，{t}的货币是{w}。",
            "用户想知道{s}使用哪一种货币。",
        ),
    },
    "legs": {
        "en": Wording(
            ("How many legs does the {s} have?", "What is the number of legs of the {s}?", "Count the legs of the {s}."),
            "The {s} has {v} legs.",
            ("There are {v} legs on the {s}.", "The number of legs of the {s} is {v}."),
            "How many legs do the {s} and the {t} have?",
            "The {s} has {v} legs and the {t} has {w} legs.",
            "The user asks for the legs of the {s}.",
        ),
        "zh": Wording(
            ("{s}有几条腿？", "{s}的腿有多少条？", "请数一数{s}的腿。"),
            "{s}这种动物有{v}条腿。",
            ("{s}有{v}条腿。", "{s}的腿有{v}条。"),
            "{s}和{t}分别有几条腿？",
            "{s}这种动物有{v}条腿，{t}这种动物有{w}条腿。",
            "用户想知道{s}一共有多少条腿。",
        ),
    },
    "class": {
        "en": Wording(
            ("What kind of animal is the {s}?", "Which class does the {s} belong to?", "Name the class of the {s}."),
            "The {s} is a kind of {v}.",
            ("The {s} belongs to the class {v}.", "The class of the {s} is {v}."),
            "What kinds of animal are the {s} and the {t}?",
            "The {s} is a kind of {v} and the {t} is a kind of {w}.",
            "The user asks for the class of the {s}.",
        ),
        "zh": Wording(
            ("{s}是哪类动物？", "{s}属于什么动物？", "请说出{s}的类别。"),
            "{s}属于{v}这一类。",
            ("{s}是{v}。", "{s}的类别是{v}。"),
            "{s}和{t}分别属于哪类动物？",
            "{s}属于{v}这一类，{t}属于{w}这一类。",
            "用户想知道{s}属于哪一类动物。",
        ),
    },
    "food": {
        "en": Wording(
            ("What does the {s} eat?", "What is the food of the {s}?", "Name the food of the {s}."),
            "The {s} likes to eat {v}.",
            ("The {s} eats {v}.", "The food of the {s} is {v}."),
            "What do the {s} and the {t} eat?",
            "The {s} likes to eat {v} and the {t} likes to eat {w}.",
            "The user asks for the food of the {s}.",
        ),
        "zh": Wording(
            ("{s}吃什么？", "{s}的食物是什么？", "请说出{s}的食物。"),
            "{s}平时喜欢吃{v}。",
            ("{s}吃{v}。", "{s}的食物是{v}。"),
            "{s}和{t}分别吃什么？",
            "{s}平时喜欢吃{v}，{t}平时喜欢吃{w}。",
            "用户想知道{s}平时喜欢吃什么。",
        ),
    },
    "sound": {
        "en": Wording(
            ("Which sound does the {s} make?", "What does the {s} say?", "Name the sound of the {s}."),
            "The sound of the {s} is {v}.",
            ("The {s} says {v}.", "When the {s} calls, we hear {v}."),
            "Which sounds do the {s} and the {t} make?",
            "The sound of the {s} is {v} and the sound of the {t} is {w}.",
            "The user asks for the sound of the {s}.",
        ),
        "zh": Wording(
            ("{s}怎么叫？", "{s}的叫声是什么？", "请学一学{s}的叫声。"),
            "{s}的叫声是{v}声。",
            ("{s}叫起来是{v}。", "我们听见{s}{v}地叫。"),
            "{s}和{t}分别怎么叫？",
            "{s}的叫声是{v}声，{t}的叫声是{w}声。",
            "用户想知道{s}的叫声是什么样的。",
        ),
    },
    "colour": {
        "en": Wording(
            ("Which colour is {s}?", "What is the colour of {s}?", "Name the colour of {s}."),
            "The colour of {s} is {v}.",
            ("We know that {s} is {v}.", "Most {s} is {v}."),
            "What are the colours of {s} and {t}?",
            "The colour of {s} is {v} and the colour of {t} is {w}.",
            "The user asks for the colour of {s}.",
        ),
        "zh": Wording(
            ("{s}是什么颜色？", "{s}的颜色是什么？", "请说出{s}的颜色。"),
            "{s}的颜色是{v}。",
            ("{s}是{v}的。", "{s}看起来是{v}的。"),
            "{s}和{t}分别是什么颜色？",
            "{s}的颜色是{v}，{t}的颜色是{w}。",
            "用户想知道{s}的颜色是哪一种。",
        ),
    },
    "kind": {
        "en": Wording(
            ("What is {s}?", "What kind of thing is {s}?", "Explain what {s} is."),
            "We call {s} a kind of {v}.",
            ("{s} is a kind of {v}.", "A well known {v} is {s}."),
            "What are {s} and {t}?",
            "We call {s} a kind of {v} and {t} a kind of {w}.",
            "The user asks what kind of thing {s} is.",
        ),
        "zh": Wording(
            ("{s}是什么？", "{s}是什么东西？", "请说明{s}是什么。"),
            "{s}是一种常见的{v}。",
            ("{s}属于{v}。", "{v}里面有{s}。"),
            "{s}和{t}分别是什么？",
            "{s}是一种常见的{v}，{t}是一种常见的{w}。",
            "用户想知道{s}是哪一种东西。",
        ),
    },
}


def _relations(table: str, kind: str, names: tuple[str, ...]) -> list[Relation]:
    rows = [[cell.split(" ") for cell in line.split("|")] for line in table.split("\n") if line]
    relations = []
    for column, name in enumerate(names, start=1):
        known = [(row[0], row[column]) for row in rows if row[column][0] != "-"]
        values = {
            "en": {subject[0]: value[0] for subject, value in known},
            "zh": {subject[1]: value[1] for subject, value in known},
        }
        relations.append(Relation(name, kind, values, _WORDING[name]))
    return relations


RELATIONS: tuple[Relation, ...] = (
    *_relations(_COUNTRIES, "country", ("capital", "language", "continent", "currency")),
    *_relations(_ANIMALS, "animal", ("legs", "class", "food", "sound")),
    *_relations(_THINGS, "thing", ("colour", "kind")),
)
KINDS: tuple[str, ...] = ("country", "animal", "thing")
