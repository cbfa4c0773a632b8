"""Steps change what they are there to change, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semblend import Namespace
from semblend.arrange import OrderLimits, find_volatile_fields
from semblend.estimate.steps import ArrangePassages, DropRepeats, MoveFields, SortTools
from semblend.text.chat import list_chat_parts
from semblend.text.parts import Part, join_parts, split_parts

HERE = Namespace()
RULES = "You answer questions about ferries, politely and in one sentence. " * 12


def ask(date: str, question: str, **more: object) -> tuple[Part, ...]:
    system = {"role": "system", "content": f"Date: {date}\n{RULES}"}
    return split_parts(list_chat_parts([system, {"role": "user", "content": question}], **more), "auto")  # type: ignore[arg-type]


def test_a_field_goes_to_the_end_of_the_whole_prompt_and_is_not_lost() -> None:
    dates = [f"2026-01-{day:02}" for day in range(1, 9)]
    prompts = [ask(date, f"When does ferry {number} leave?") for number, date in enumerate(dates)]
    step = MoveFields(find_volatile_fields([join_parts(parts) for parts in prompts]))
    assert [field.name for field in step.fields] == ["date"]
    moved = [join_parts(step.apply(parts, HERE)) for parts in prompts]
    for number, text in enumerate(moved):
        assert text.endswith(f"Date: {dates[number]}")
        assert text.startswith(f"<|system|>\n{RULES}")
    assert sorted(moved[0]) == sorted(join_parts(prompts[0]))


def test_a_prompt_without_the_field_stays_the_object_it_was() -> None:
    dates = [ask(f"2026-01-{day:02}", "When?") for day in range(1, 9)]
    step = MoveFields(find_volatile_fields([join_parts(parts) for parts in dates]))
    other = (Part("Nothing of that kind."),)
    assert step.apply(other, HERE) is other
    assert MoveFields(()).apply(dates[0], HERE) is dates[0]


def test_tools_in_any_order_become_one_prompt() -> None:
    tools = [{"name": name, "description": "does it"} for name in "cab"]
    sorted_ = {
        join_parts(SortTools().apply(ask("x", "When?", tools=order), HERE))
        for order in (tools, tools[::-1], tools[1:] + tools[:1])
    }
    assert len(sorted_) == 1
    parts = ask("x", "When?", tools=sorted(tools, key=str))
    assert SortTools().apply(parts, HERE) is SortTools().apply(parts, HERE)


def test_a_result_that_comes_twice_is_referred_to_and_a_short_one_is_not() -> None:
    long, short = "The timetable of the northern line. " * 20, "done"
    parts = tuple(Part(text, "result") for text in (long, short, long, short))
    assert [part.text for part in DropRepeats().apply(parts, HERE)] == [
        long,
        short,
        "[same as the passage that begins with “The timetable of the northern line.”]",
        short,
    ]
    assert DropRepeats().apply(parts[:2], HERE) is not None
    assert DropRepeats().apply(parts[:2], HERE) == parts[:2]


def test_passages_are_put_into_the_order_of_an_earlier_prompt_and_numbers_stay() -> None:
    step = ArrangePassages(100_000)
    bodies = [f"Passage about port {name}, long enough to be one." for name in "abc"]

    def write(order: str) -> tuple[Part, ...]:
        listed = "\n".join(f"Document {n + 1}: {bodies['abc'.index(name)]}" for n, name in enumerate(order))
        return split_parts([Part(f"Read.\n{listed}\n\nWhy?")], "auto")

    first = join_parts(step.apply(write("bca"), HERE))
    assert first == join_parts(write("bca"))
    assert join_parts(step.apply(write("abc"), HERE)) == first
    assert join_parts(step.apply(write("cab"), Namespace(tenant="b"))) == join_parts(write("cab"))


@given(st.lists(st.sampled_from(["a" * 250, "b" * 250, "c" * 250, "d"]), max_size=6), st.data())
def test_steps_keep_every_text_but_the_repeated_ones(texts: list[str], data: st.DataObject) -> None:
    kinds = [data.draw(st.sampled_from(["text", "passage", "tool", "result"])) for _ in texts]
    parts = tuple(Part(text, kind, "g") for text, kind in zip(texts, kinds, strict=True))
    for step in (SortTools(), ArrangePassages(100_000)):
        assert sorted(part.text for part in step.apply(parts, HERE)) == sorted(texts)
    dropped = DropRepeats().apply(parts, HERE)
    assert {part.text for part in dropped if not part.text.startswith("[same")} == set(texts)


def test_a_list_of_thousands_of_passages_stays_as_it_is() -> None:
    parts = tuple(Part(f"passage {number}", "passage", "g") for number in range(20_000))
    assert ArrangePassages(100_000).apply(parts, HERE) is parts


def test_the_arranger_is_told_the_caches_size_and_seeks_nothing_that_such_a_cache_has_dropped() -> None:
    def send(step: ArrangePassages, names: str, keep: OrderLimits = OrderLimits()) -> str:  # noqa: B008
        parts = tuple(Part(name * 100, "passage", "g", marked=True) for name in names)
        return "".join(part.text[0] for part in step.apply(parts, HERE, keep))

    small = ArrangePassages(150)  # 600 characters: two prompts
    for step in (small, small.scale(10)):
        for names in ("abc", "uvw", "xyz", "ca"):
            send(step, names, OrderLimits(within=0))
        assert send(step, "bac") == ("cab" if step is small else "abc")
