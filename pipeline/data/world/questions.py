"""Questions with one good answer: about the world, about a story told in the question, and small talk.

Everything is drawn from the `random.Random` that is passed in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from pipeline.data.world.facts import RELATIONS, Relation

NAMES = {
    "en": ("Anna", "Tom", "Mary", "Jack", "Lucy", "Peter", "Emma", "Paul", "Nina", "Max", "Clara", "Leo"),
    "zh": ("小明", "小红", "小华", "小丽", "小刚", "小芳", "小军", "小美", "小强", "小云", "小雨", "小东"),
}
COLOURS = {
    "en": ("red", "yellow", "green", "blue", "white", "black", "purple", "brown"),
    "zh": ("红色", "黄色", "绿色", "蓝色", "白色", "黑色", "紫色", "棕色"),
}
OBJECTS = {
    "en": ("ball", "book", "cup", "hat", "box", "pen", "bag", "coat"),
    "zh": ("皮球", "书", "杯子", "帽子", "盒子", "钢笔", "书包", "外套"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """`sentence` is the good answer, `value` its bare core, `wrong` a sentence of the same form that is false.

    `answers` is what a right reply must hold, however it is worded; empty for small talk, which has no right answer.
    """

    language: str
    text: str
    sentence: str
    value: str
    wrong: str
    thought: str
    answers: tuple[str, ...] = ()


def join(language: str, *sentences: str) -> str:
    """Returns the sentences in a row: with a space between them in English, without in Chinese."""
    return (" " if language == "en" else "").join(sentences)


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def other(random: Random, values: Mapping[str, str], value: str) -> str:
    return random.choice(sorted(set(values.values()) - {value}))


def fact(random: Random, language: str) -> Question:
    """Returns a question about one subject."""
    relation = random.choice(RELATIONS)
    return about(random, language, relation, random.choice(sorted(relation.values[language])), None)


def about(random: Random, language: str, relation: Relation, subject: str, text: str | None) -> Question:
    """Returns the question about this subject; `text` replaces its words (a follow-up)."""
    wording, values = relation.wording[language], relation.values[language]
    value = values[subject]
    return Question(
        language,
        text or random.choice(wording.questions).format(s=subject),
        capitalised(wording.answer.format(s=subject, v=value)),
        value,
        capitalised(wording.answer.format(s=subject, v=other(random, values, value))),
        wording.thought.format(s=subject),
        (value,),
    )


def pair(random: Random, language: str) -> Question:
    """Returns a question about two subjects of one relation."""
    relation = random.choice(RELATIONS)
    wording, values = relation.wording[language], relation.values[language]
    s, t = random.sample(sorted(values), 2)
    v, w = values[s], values[t]
    text, sentence = (template.format(s=s, t=t, v=v, w=w) for template in (wording.pair_question, wording.pair_answer))
    wrong = wording.pair_answer.format(s=s, t=t, v=other(random, values, v), w=w)
    value = f"{v} and {w}" if language == "en" else f"{v}和{w}"
    return Question(language, text, capitalised(sentence), value, capitalised(wrong), wording.thought.format(s=s), (v, w))


# Told, asked, answered, thought; {a} and {b} are people, {x} and {y} what is told about them, {o} an object.
_STORIES = {
    "en": (
        (
            "{a} is in room {x} and {b} is in room {y}.",
            "Where is {a}?",
            "{a} is in room {x}.",
            "The story gives the room of {a}.",
        ),
        ("{a} is {x} years old and {b} is {y}.", "How old is {a}?", "{a} is {x} years old.", "The story gives the age of {a}."),
        (
            "The code of {a} is {x}, the code of {b} is {y}.",
            "What is the code of {a}?",
            "The code of {a} is {x}.",
            "The story gives the code of {a}.",
        ),
        (
            "{a} has a {x} {o} and {b} has a {y} one.",
            "What colour is the {o} of {a}?",
            "The {o} of {a} is {x}.",
            "The story gives the colour for {a}.",
        ),
    ),
    "zh": (
        ("{a}在{x}号房间，{b}在{y}号房间。", "{a}在哪个房间？", "{a}在{x}号房间。", "故事里说了{a}在几号房间里。"),
        ("{a}今年{x}岁，{b}今年{y}岁。", "{a}多大了？", "{a}今年已经{x}岁了。", "故事里说了{a}今年是多少岁。"),
        ("{a}的密码是{x}，{b}的密码是{y}。", "{a}的密码是多少？", "{a}的密码是{x}。", "故事里说了{a}的密码是多少。"),
        ("{a}的{o}是{x}的，{b}的是{y}的。", "{a}的{o}是什么颜色？", "{a}的{o}是{x}的。", "故事里说了{a}的东西的颜色。"),
    ),
}
_NUMBERS = ((100, 999), (11, 99), (1000, 9999))


def story(random: Random, language: str) -> Question:
    """Returns a two-person story and a question that its own text answers."""
    index = random.randrange(4)
    told, asked, answered, thought = _STORIES[language][index]
    names = dict(zip("ab", random.sample(NAMES[language], 2), strict=True))
    if index < 3:
        low, high = _NUMBERS[index]
        x, y = (str(number) for number in random.sample(range(low, high + 1), 2))
    else:
        x, y = random.sample(COLOURS[language], 2)
    first, second = (x, y) if random.random() < 0.5 else (y, x)
    o = random.choice(OBJECTS[language])
    if first == x:
        scene = told.format(**names, x=x, y=y, o=o)
    else:  # the one asked about comes second
        scene = told.format(a=names["b"], b=names["a"], x=y, y=x, o=o)
    return Question(
        language,
        join(language, scene, asked.format(**names, o=o)),
        answered.format(**names, x=x, o=o),
        x,
        answered.format(**names, x=y, o=o),
        thought.format(**names),
        (x,),
    )


# Asked, good, core, a false one, thought.
_SMALL_TALK = {
    "en": (
        (
            ("Hello!", "Hi!", "Hello there.", "Hey!"),
            "Hello, how can I help you?",
            "Hello",
            "Hello, I am busy now.",
            "The user greets me, I greet back.",
        ),
        (
            ("Good morning!", "Good day!"),
            "Good day, how can I help you?",
            "Good day",
            "Good night, I am busy now.",
            "The user greets me, I greet back.",
        ),
        (
            ("Who are you?", "What is your name?", "What are you called?"),
            "I am minimind, a small assistant.",
            "minimind",
            "I am Max, a big horse.",
            "The user asks who I am.",
        ),
        (
            ("What can you do?", "How can you help me?"),
            "I can answer questions and use tools.",
            "questions",
            "I can fly and cook.",
            "The user asks what I can do.",
        ),
        (
            ("Thank you!", "Thanks a lot."),
            "You are welcome, ask me again.",
            "Welcome",
            "You are wrong, go away.",
            "The user thanks me, I answer kindly.",
        ),
        (
            ("Goodbye!", "Bye!"),
            "Goodbye, see you next time.",
            "Bye",
            "Goodbye, never come back.",
            "The user leaves, I say goodbye.",
        ),
    ),
    "zh": (
        (
            ("你好！", "你好。", "嗨！", "您好！"),
            "你好，请问需要什么帮助？",
            "你好",
            "你好，我现在没空。",
            "用户在打招呼，我也问一声好。",
        ),
        (("早上好！", "上午好！"), "早上好，请问需要什么帮助？", "早", "晚安，我现在没空。", "用户在打招呼，我也问一声好。"),
        (
            ("你是谁？", "你叫什么名字？", "怎么称呼你？"),
            "我是minimind，一个小助手。",
            "minimind",
            "我是小强，一匹大马。",
            "用户想知道我到底是什么人。",
        ),
        (
            ("你会做什么？", "你能帮我什么？"),
            "我可以回答问题和使用工具。",
            "回答问题",
            "我可以飞和做饭。",
            "用户想知道我可以做什么事。",
        ),
        (("谢谢！", "多谢你。"), "不客气，有问题再来问我。", "不客气", "你错了，快走开吧。", "用户在感谢我，我礼貌地回答。"),
        (("再见！", "拜拜。"), "再见，期待下次和你聊天。", "再见", "再见，不要再来了。", "用户要离开了，我说一声再见。"),
    ),
}


def small_talk(random: Random, language: str) -> Question:
    """Returns a greeting, thanks, or a question about the assistant itself."""
    asked, sentence, value, wrong, thought = random.choice(_SMALL_TALK[language])
    return Question(language, random.choice(asked), sentence, value, wrong, thought)


QUESTIONS = {"fact": fact, "pair": pair, "story": story, "small_talk": small_talk}
_FOLLOW_UP = {"en": ("And {s}?", "What about {s}?"), "zh": ("那{s}呢？", "{s}呢？")}


def conversation(random: Random, language: str, turns: int) -> list[Question]:
    """Returns `turns` questions on one relation; all but the first name only the new subject ("And Japan?")."""
    relation = random.choice(RELATIONS)
    subjects = random.sample(sorted(relation.values[language]), turns)
    texts = [None, *(random.choice(_FOLLOW_UP[language]).format(s=subject) for subject in subjects[1:])]
    return [about(random, language, relation, subject, text) for subject, text in zip(subjects, texts, strict=True)]
