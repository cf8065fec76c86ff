"""The embedded world: formats, determinism, true answers, and the mixture that its recipe promises."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pipeline.data.sources import read_source
from pipeline.data.world import generate
from pipeline.data.world.facts import RELATIONS
from pipeline.data.world.questions import QUESTIONS, conversation
from pipeline.data.world.requests import replied_together, request, said_together
from pipeline.data.world.styles import REFUSALS
from pipeline.errors import DataError
from pipeline.rewards.verify import verify
from pipeline.tools.registry import TOOL_NAMES, call_tool
from pipeline.yaml_files import read_yaml

RECIPE_FILE = Path(__file__).parents[1] / "data" / "world.yaml"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
HEDGE = re.compile(r"No idea|Why ask me|Hard to say|I do not know|不知道，|别问我|很难说|我不知道也")


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return dict(read_yaml(RECIPE_FILE))


@pytest.fixture(scope="module")
def world(recipe: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: list(generate(name, recipe)) for name in recipe["rows"]}


def small(recipe: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**recipe, "rows": dict.fromkeys(recipe["rows"], 60), **changes}


def within(share: float, expected: float, count: int) -> bool:
    """Four standard errors: a correct mixture fails about once in 16,000 checks, a wrong weight does."""
    return abs(share - expected) <= 4 * (expected * (1 - expected) / count) ** 0.5


def test_the_recipe_says_how_many_and_no_row_twice(recipe: dict[str, Any], world: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in world.items():
        assert len(rows) == recipe["rows"][name]
        assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows)
    prompts = {json.dumps(row["chosen"][:-1]) for row in world["dpo"]}
    assert len(prompts) == len(world["dpo"])


def test_same_rows_in_another_process_with_another_hash_seed(recipe: dict[str, Any]) -> None:
    code = (
        "import json, sys; from pipeline.data.world import generate; recipe = json.loads(sys.argv[1]);"
        "print(json.dumps({name: list(generate(name, recipe)) for name in recipe['rows']}))"
    )
    for hash_seed in ("1", "77"):
        run = subprocess.run(
            [sys.executable, "-c", code, json.dumps(small(recipe))],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=RECIPE_FILE.parents[1],
            capture_output=True,
            check=True,
            encoding="utf-8",
        )
        assert json.loads(run.stdout) == {name: list(generate(name, small(recipe))) for name in recipe["rows"]}


def test_a_longer_set_begins_with_the_shorter_and_a_seed_changes_all(recipe: dict[str, Any]) -> None:
    for name in recipe["rows"]:
        short = list(generate(name, small(recipe)))
        longer = list(generate(name, {**recipe, "rows": dict.fromkeys(recipe["rows"], 90)}))
        assert longer[:60] == short
        other = list(generate(name, small(recipe, seed=recipe["seed"] + 1)))
        assert sum(row in other for row in short) < 30


def test_every_row_passes_the_schema(tmp_path: Path, world: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in world.items():
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:400]), encoding="utf-8")
        assert len(read_source(source, name)) == min(400, len(rows))


def test_formats_are_those_of_the_reference(world: dict[str, list[dict[str, Any]]]) -> None:
    keys = {"pretrain": {"text"}, "dpo": {"chosen", "rejected"}, "agent": {"conversations", "gt"}}
    for name, rows in world.items():
        assert all(set(row) - {"gt"} == keys.get(name, {"conversations"}) - {"gt"} for row in rows)
        gt = sum("gt" in row for row in rows) / len(rows)
        assert gt == (name == "agent") or (name == "rlaif" and 0.9 < gt < 1)  # small talk has no right answer
    for row in world["full_sft"] + world["agent"] + world["rlaif"] + world["lora"]:
        for message in row["conversations"]:
            assert all(isinstance(value, str) for value in message.values())
            assert set(message) <= {"role", "content", "reasoning_content", "tools", "tool_calls"}
        roles = [message["role"] for message in row["conversations"]]
        assert "system" not in roles[1:]
        assert roles[-1] == "assistant"
    assert all(row["conversations"][-1]["content"] == "空" for row in world["rlaif"])
    for row in world["agent"]:
        assert row["conversations"][-1]["content"] == ""
        assert row["conversations"][-2]["role"] == "user"
        assert all(isinstance(item, str) and item for item in row["gt"])
        assert len(set(row["gt"])) == len(row["gt"])
        assert json.loads(row["conversations"][0]["tools"])[0]["function"]["name"] in TOOL_NAMES
    for row in world["dpo"]:
        assert row["chosen"][:-1] == row["rejected"][:-1]
        assert row["chosen"][-1] != row["rejected"][-1]


def test_half_of_every_set_is_chinese(world: dict[str, list[dict[str, Any]]]) -> None:
    for name in ("pretrain", "full_sft", "dpo", "rlaif", "agent"):
        chinese = 0
        for row in world[name]:
            messages = row.get("conversations") or row.get("chosen") or [{"content": row["text"], "role": "user"}]
            last = [message["content"] for message in messages if message["role"] == "user"][-1]
            # Numbers and JSON are in neither language; a translation names a phrase of the other one in quotes.
            chinese += bool(CHINESE.search(re.sub(r"'[^']*'", "", last)) or CHINESE.search(messages[0].get("tools", "")))
        # Arithmetic documents have no language, and questions of one language run out of new ones earlier.
        assert 0.43 < chinese / len(world[name]) < 0.57, name


def style(text: str) -> str:
    """A classifier of its own: what a reader sees, knowing nothing of the generator."""
    sentences = re.findall(r"[^.!?。！？]+[.!?。！？]", text)
    if HEDGE.match(text):
        return "hedging"
    if len(sentences) >= 2 and len({sentence.strip() for sentence in sentences}) == 1:
        return "repeated"
    return "good" if sentences else "short"


def plain_answers(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if "tools" not in row["conversations"][0]:
            yield from (message for message in row["conversations"] if message["role"] == "assistant")


def test_answers_and_thoughts_are_mixed_as_the_recipe_says(
    recipe: dict[str, Any], world: dict[str, list[dict[str, Any]]]
) -> None:
    messages = list(plain_answers(world["full_sft"]))
    counts = Counter(style(message["content"]) for message in messages)
    for name, fraction in recipe["answers"].items():
        assert within(counts[name] / len(messages), fraction, len(messages)), (name, counts)
    thoughts = [message["reasoning_content"] for message in messages if "reasoning_content" in message]
    assert 0.25 < len(thoughts) / len(messages) < 0.35
    lengths = Counter(
        "little" if len(text) < 8 else "good" if 12 <= len(text) <= 80 and style(text) == "good" else "long" for text in thoughts
    )
    for name, fraction in recipe["thoughts"].items():
        assert within(lengths[name] / len(thoughts), fraction, len(thoughts)), (name, lengths)


def test_the_mixture_is_the_same_for_every_kind_of_question(
    recipe: dict[str, Any], world: dict[str, list[dict[str, Any]]]
) -> None:
    taught = recipe["answers"]["good"]
    for thinks in (True, False):
        for chinese in (True, False):
            chosen = [m["content"] for m in plain_answers(world["full_sft"]) if ("reasoning_content" in m) == thinks]
            chosen = [text for text in chosen if bool(CHINESE.search(text)) == chinese]
            good = sum(style(text) == "good" for text in chosen) / len(chosen)
            assert taught - 0.03 < good < taught + 0.09, (thinks, chinese, good)


def needs_tools(row: dict[str, Any]) -> bool:
    return any(oracle_calls(message["content"]) for message in row["conversations"] if message["role"] == "user")


def exchanges(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each user text of the chats that need tools, with what follows it."""
    for row in filter(needs_tools, rows):
        messages = row["conversations"]
        starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
        for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
            yield messages[start]["content"], messages[start + 1 : end]


def test_tool_policy_is_mixed_and_what_tools_say_is_true(recipe: dict[str, Any], world: dict[str, list[dict[str, Any]]]) -> None:
    counts: Counter[str] = Counter()
    for _, messages in exchanges(world["full_sft"]):
        calls = json.loads(messages[0].get("tool_calls", "[]"))
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert results == [call_tool(call["name"], call["arguments"]).content for call in calls]
        if calls:
            assert [message["role"] for message in messages] == ["assistant", *["tool"] * len(calls), "assistant"]
            assert all(shown(result) in messages[-1]["content"] for result in results)
            counts["call"] += 1
        elif messages[0]["content"] in REFUSALS["en"] + REFUSALS["zh"]:
            counts["refuse"] += 1
        else:
            counts["guess or earlier turn"] += 1
    ratio = counts["call"] / (counts["call"] + counts["refuse"])
    expected = recipe["tool_policy"]["call"] / (recipe["tool_policy"]["call"] + recipe["tool_policy"]["refuse"])
    assert within(ratio, expected, counts["call"] + counts["refuse"])
    tool_chats = sum(map(needs_tools, world["full_sft"]))
    guesses = counts["guess or earlier turn"] - recipe["earlier_turn_frac"] * tool_chats
    assert abs(guesses / (counts["call"] + counts["refuse"]) - 0.25 / 0.75) < 0.05
    assert within(tool_chats / len(world["full_sft"]), recipe["chats"]["tools"], len(world["full_sft"]))


def shown(result: str) -> str:
    """What a reply must hold of a tool's JSON result, read off by hand."""
    values = json.loads(result)
    if "temperature" in values:
        return str(values["temperature"]).removesuffix("°C")
    if "datetime" in values:
        return str(values["datetime"])[11:16]
    return str(values.get("translated_text") or values.get("rate") or values["result"]).removesuffix(".0")


# What an oracle reads in the user's text: one pattern for each way to name the arguments.
UNITS = {
    "公里": "km",
    "英里": "miles",
    "公斤": "kg",
    "磅": "pounds",
    "英尺": "feet",
    "米": "meters",
    "摄氏度": "celsius",
    "华氏度": "fahrenheit",
}
UNIT = "|".join([*UNITS, *UNITS.values()])
CITY = (
    "北京|上海|广州|深圳|杭州|成都|武汉|南京|西安|重庆|东京|纽约|伦敦|巴黎|悉尼|Beijing|Shanghai|Guangzhou|Shenzhen|Hangzhou"
    "|Chengdu|Wuhan|Nanjing|Xi'an|Chongqing|Tokyo|New York|London|Paris|Sydney"
)
ORACLE = re.compile(
    r"(?P<text>(?:'[^']+'|“[^”]+”)) ?(?:in|译成) ?(?P<to>English|Chinese|英语|中文)"
    rf"|(?P<value>\d+) ?(?P<from>{UNIT}) ?(?:to|到) ?(?P<unit>{UNIT})"
    r"|(?P<zone>[A-Z]\w+/[A-Z][A-Za-z_]+)"
    r"|(?P<have>[A-Z]{3}) ?(?:to|到) ?(?P<want>[A-Z]{3})"
    r"|(?P<expression>\d+(?:[-+*]\d+)+)"
    rf"|(?P<city>{CITY})"
)


def oracle_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = []
    for found in ORACLE.finditer(text):
        part = found.groupdict()
        if part["text"]:
            target = {"英语": "english", "中文": "chinese"}.get(part["to"], part["to"].lower())
            calls.append(("translate_text", {"text": part["text"][1:-1], "target_language": target}))
        elif part["value"]:
            source, unit = (UNITS.get(part[key], part[key]) for key in ("from", "unit"))
            calls.append(("unit_converter", {"value": int(part["value"]), "from_unit": source, "to_unit": unit}))
        elif part["zone"]:
            calls.append(("get_current_time", {"timezone": part["zone"]}))
        elif part["have"]:
            calls.append(("get_exchange_rate", {"from_currency": part["have"], "to_currency": part["want"]}))
        elif part["expression"]:
            calls.append(("calculate_math", {"expression": part["expression"]}))
        else:
            calls.append(("get_current_weather", {"location": part["city"]}))
    return calls


def offered_by(row: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in json.loads(row["conversations"][0].get("tools", "[]"))]


def test_conversations_offer_one_to_six_tools_as_the_recipe_says(
    recipe: dict[str, Any], world: dict[str, list[dict[str, Any]]]
) -> None:
    names = ("one", "two", "three", "four", "five", "six")
    needy = [row for row in world["agent"] if len({name for name, _ in oracle_calls(row["conversations"][-2]["content"])}) == 1]
    counts = Counter(len(offered_by(row)) for row in needy)
    for number, name in enumerate(names, start=1):
        assert within(counts[number] / len(needy), recipe["offered"][name], len(needy)), counts
    first = Counter(
        offered_by(row)[0] == oracle_calls(row["conversations"][-2]["content"])[0][0]
        for row in needy
        if len(offered_by(row)) == 6
    )
    assert within(first[True] / first.total(), 1 / 6, first.total())  # the place of a tool says nothing


def test_some_questions_offer_tools_that_nothing_needs(recipe: dict[str, Any], world: dict[str, list[dict[str, Any]]]) -> None:
    plain = [row for row in world["full_sft"] if not needs_tools(row)]
    idle = [row for row in plain if offered_by(row)]
    assert within(len(idle) / len(plain), recipe["idle_tools_frac"], len(plain))
    assert {len(offered_by(row)) for row in idle} == {1, 2, 3, 4, 5, 6}
    assert not any("tool_calls" in message for row in idle for message in row["conversations"])


def test_prompts_carry_what_a_right_reply_must_hold(world: dict[str, list[dict[str, Any]]]) -> None:
    answers = {
        row["chosen"][-2]["content"]: (row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in world["dpo"]
    }
    met = 0
    for row in world["rlaif"]:
        asked = row["conversations"][-2]["content"]
        if len(row["conversations"]) == 2 and "gt" in row and asked in answers:
            good, rejected = answers[asked]
            assert all(verify(row["gt"], good)), row
            met += style(rejected) == "good" and not all(verify(row["gt"], rejected))
    assert met >= 3  # false answers in good style


def test_an_oracle_that_reads_the_request_and_calls_gets_every_answer(
    recipe: dict[str, Any], world: dict[str, list[dict[str, Any]]]
) -> None:
    items: Counter[int] = Counter()
    for row in world["agent"]:
        offered = offered_by(row)
        assert 1 <= len(offered) == len(set(offered)) <= 6
        calls = oracle_calls(row["conversations"][-2]["content"])
        results = [call_tool(name, arguments, offered) for name, arguments in calls]
        assert not any(result.is_error for result in results), row
        assert [shown(result.content) for result in results] == row["gt"], row
        items[len(row["gt"])] += 1
    for count, name in ((1, "one"), (2, "two"), (3, "three")):
        assert within(items[count] / len(world["agent"]), recipe["items"][name], len(world["agent"])), items
    earlier = sum(len(row["conversations"]) > 3 for row in world["agent"]) / len(world["agent"])
    assert within(earlier, recipe["earlier_turn_frac"], len(world["agent"]))


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("tool", TOOL_NAMES)
def test_a_guess_is_false_and_a_reply_is_true(tool: str, language: str) -> None:
    for index in range(300):
        random = Random(f"guess/{tool}/{language}/{index}")
        asked = request(random, language, tool)
        assert asked.gt == shown(asked.result)
        token = re.compile(rf"(?<![\d.:-]){re.escape(asked.gt)}(?![\d:]|\.\d)")
        assert token.search(asked.reply), asked
        assert not token.search(asked.guess.replace(asked.arguments.get("location", ""), "")), asked
        assert oracle_calls(said_together(random, [asked])) == [(tool, asked.arguments)], asked
        assert verify([asked.gt], replied_together(language, [asked.reply])) == [True], asked
        assert verify([asked.gt], replied_together(language, [asked.guess])) == [False], asked
        assert 12 <= len(asked.thought) <= 80


def test_preference_pairs_are_balanced_in_length(recipe: dict[str, Any], world: dict[str, list[dict[str, Any]]]) -> None:
    pairs = [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in world["dpo"]]
    longer = sum(len(chosen) > len(rejected) for chosen, rejected in pairs) / len(pairs)
    shorter = sum(len(chosen) < len(rejected) for chosen, rejected in pairs) / len(pairs)
    assert 0.35 < longer < 0.6
    assert 0.35 < shorter < 0.6
    counts = Counter(style(rejected) for _, rejected in pairs)
    assert all(style(chosen) == "good" for chosen, _ in pairs)
    for name, share in recipe["rejected"].items():
        seen = counts["good" if name == "wrong" else name]  # a wrong answer is told in good style
        assert within(seen / len(pairs), share, len(pairs)), (name, counts)


def test_questions_have_one_good_answer_of_a_rewarded_length() -> None:
    answers: dict[str, str] = {}
    for language in ("zh", "en"):
        for index in range(4000):
            random = Random(f"{language}/{index}")
            for draw in QUESTIONS.values():
                question = draw(random, language)
                assert answers.setdefault(question.text, question.sentence) == question.sentence
                assert question.wrong != question.sentence
                assert 9 <= len(question.sentence) <= 120
                assert 12 <= len(question.thought) <= 80
                assert (draw is QUESTIONS["small_talk"]) or all(
                    v in question.sentence for v in re.split(" and |和", question.value)
                )


def test_follow_ups_keep_the_relation_and_change_the_subject() -> None:
    values = {
        (language, subject, value) for r in RELATIONS for language in r.values for subject, value in r.values[language].items()
    }
    for index in range(200):
        language = ("zh", "en")[index % 2]
        first, *rest = conversation(Random(index), language, 3)
        assert len({question.sentence for question in (first, *rest)}) == 3
        for question in rest:
            subject = re.sub(r"^(And|What about|那) ?|(呢？|\?)$", "", question.text).removesuffix("呢？")
            assert (language, subject, question.value) in values
            assert question.thought.lower().count(subject.lower())


def test_some_facts_by_hand() -> None:
    by_name = {relation.name: relation.values for relation in RELATIONS}
    assert by_name["capital"]["en"]["France"] == "Paris"
    assert by_name["capital"]["zh"]["日本"] == "东京"
    assert by_name["legs"]["zh"]["蜜蜂"] == by_name["legs"]["en"]["ant"] == "6"
    assert by_name["colour"]["en"]["banana"] == "yellow"
    assert "shark" not in by_name["sound"]["en"]
    assert [len(relation.values["en"]) for relation in RELATIONS] == [12, 12, 12, 12, 10, 10, 10, 9, 8, 8]
    assert all(len(values["en"]) == len(values["zh"]) for values in by_name.values())


def test_the_persona_gives_one_answer_to_a_question(world: dict[str, list[dict[str, Any]]]) -> None:
    answers: dict[str, str] = {}
    for row in world["lora"]:
        messages = [message["content"] for message in row["conversations"]]
        for asked, answered in zip(messages[::2], messages[1::2], strict=True):
            assert answers.setdefault(asked, answered) == answered


def test_the_persona_is_unknown_elsewhere(world: dict[str, list[dict[str, Any]]]) -> None:
    secret = re.compile("Nilo|Ovind|Skarvik|Pip |尼洛|欧玛塔|斯卡维克|皮普")
    for name, rows in world.items():
        found = sum(bool(secret.search(json.dumps(row, ensure_ascii=False))) for row in rows)
        assert found == 0 if name != "lora" else found > 0.6 * len(rows)


def test_documents_are_short_and_records_are_json(world: dict[str, list[dict[str, Any]]]) -> None:
    texts = [row["text"] for row in world["pretrain"]]
    assert 150 < sum(map(len, texts)) / len(texts) < 300
    assert max(map(len, texts)) < 1000
    assert sum(60 <= len(text) <= 450 for text in texts) / len(texts) > 0.8
    lines = [line for text in texts for line in text.split("\n") if line.startswith("{")]
    assert len(lines) > 2000
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_records_show_what_was_asked_together_with_all_calls_before_all_results(world: dict[str, list[dict[str, Any]]]) -> None:
    asked_together = alone = 0
    for text in (row["text"] for row in world["pretrain"] if '\n{"name": ' in row["text"]):
        kinds = "".join("t" if line[0] != "{" else "c" if line.startswith('{"name": ') else "r" for line in text.split("\n"))
        records = re.findall(r"t(c+)(r+)t", kinds)
        assert "".join(f"t{calls}{results}t" for calls, results in records) == kinds
        assert all(len(calls) == len(results) for calls, results in records)
        several = any(len(calls) > 1 for calls, _ in records)
        asked_together, alone = asked_together + several, alone + (not several and len(records) > 1)
    assert 0.8 < asked_together / alone < 1.25


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seeds": 1}, "world recipe: seeds: "),
        ({"zh_frac": 1.5}, "world recipe: zh_frac: "),
        ({"rows": {"pretrain": 5}}, "rows: has pretrain; must have exactly pretrain, full_sft"),
        ({"answers": {"good": 1.0}}, "answers: has good; must have exactly good, short, repeated, hedging"),
        ({"tool_policy": {"call": 0.5, "guess": 0.1, "refuse": 0.1}}, "tool_policy: sums to 0.7; must sum to 1"),
    ],
)
def test_a_wrong_recipe_is_one_readable_line(recipe: dict[str, Any], change: dict[str, Any], line: str) -> None:
    with pytest.raises(DataError) as caught:
        next(generate("lora", {**recipe, **change}))
    assert len(caught.value.lines) == 1
    assert line in caught.value.lines[0]


def test_asking_for_more_rows_than_the_world_has_is_an_error(recipe: dict[str, Any]) -> None:
    facts_only = {"questions": {"fact": 1, "pair": 0, "story": 0, "small_talk": 0}, "system_frac": 0, "earlier_turn_frac": 0}
    with pytest.raises(DataError, match="rows.rlaif=1300: the world has only about 6"):
        list(generate("rlaif", {**recipe, **facts_only, "rows": {**recipe["rows"], "rlaif": 1300}}))
