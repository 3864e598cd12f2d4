"""The rows of a conversation: when it has several, what is left out of them, given tokens, batches."""

import pytest

from dflash_core.data.chat import Rendered, Unprovable, check_as_served, longest_run, open_chat, token_rows, token_rows_batch
from dflash_core.records import Conversation, TokenRow
from tests.data.templates import TEMPLATES
from tests.data.test_chat import STOP, TWO_TURNS, render, row_of, rows_of, supervised
from tests.fakes import CHATML, IM_END, chats, make_tokenizer


@pytest.mark.parametrize("name", ["counting", "stops at the end"])
def test_a_template_that_renders_a_turn_otherwise_later_gives_a_row_a_turn_as_served(name: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name])
    rendered = rows_of(tokenizer, TWO_TURNS)
    assert rendered.method == "turns"
    assert [row.id for row in rendered.rows] == ["x/turn-1", "x/turn-3"]
    for row, turn in zip(rendered.rows, (1, 3), strict=True):
        prompt = render(tokenizer, TWO_TURNS[:turn], generation_prompt=True)
        answer = TWO_TURNS[turn]["content"] + "<|im_end|>"
        assert tokenizer.decode(row.input_ids) == prompt + answer + "\n"
        assert supervised(tokenizer, row) == [answer]


def test_a_prompt_that_opens_what_the_row_lacks_is_replaced_by_its_header() -> None:
    """The server's prompt ends in <think>, the data has none: the answers stand behind the header that both have."""
    tokenizer = make_tokenizer(TEMPLATES["other prompt"])
    rendered = rows_of(tokenizer, TWO_TURNS)
    assert rendered.method == "sentinel"
    (row,) = rendered.rows
    assert tokenizer.decode(row.input_ids) == render(tokenizer, TWO_TURNS, generation_prompt=False)
    assert supervised(tokenizer, row) == [m["content"] + "<|im_end|>" for m in TWO_TURNS if m["role"] == "assistant"]


def test_one_row_marks_earlier_answers_where_they_stand() -> None:
    tokenizer = make_tokenizer(TEMPLATES["T4 reasoning"])
    messages = [*TWO_TURNS[:1], {**TWO_TURNS[1], "reasoning_content": "add one"}, *TWO_TURNS[2:]]
    rendered = rows_of(tokenizer, messages, one_row=True)
    assert rendered.method == "sentinel"
    (row,) = rendered.rows
    assert tokenizer.decode(row.input_ids) == render(tokenizer, messages, generation_prompt=False)
    assert supervised(tokenizer, row) == [
        TWO_TURNS[1]["content"] + "<|im_end|>",
        "<think>\n\n</think>\n\n" + TWO_TURNS[3]["content"] + "<|im_end|>",
    ]


@pytest.mark.parametrize("name", ["T1 chatml", "T2 tagged"])
def test_a_marked_message_is_not_trained(name: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name])
    messages = [TWO_TURNS[0], {**TWO_TURNS[1], "loss_mask": 0}, *TWO_TURNS[2:]]
    row = row_of(tokenizer, messages)
    assert supervised(tokenizer, row) == [TWO_TURNS[3]["content"] + "<|im_end|>"]
    assert row.input_ids == row_of(tokenizer, TWO_TURNS).input_ids
    for marks, reason in (((0, 0), "every assistant turn has loss_mask 0"), ((1, 2), "loss_mask is neither 0 nor 1")):
        marked = [{**m, "loss_mask": mark} for m, mark in zip(TWO_TURNS[1::2], marks, strict=True)]
        with pytest.raises(Unprovable, match=reason):
            row_of(tokenizer, [TWO_TURNS[0], marked[0], TWO_TURNS[2], marked[1]])


def test_a_greeting_before_any_user_is_not_trained() -> None:
    tokenizer = make_tokenizer()
    rendered = rows_of(tokenizer, TWO_TURNS[1:])
    assert supervised(tokenizer, rendered.rows[0]) == [TWO_TURNS[3]["content"] + "<|im_end|>"]
    assert rendered.notes == ("the assistant speaks first",)


def test_what_follows_the_last_answer_is_left_out() -> None:
    tokenizer = make_tokenizer()
    assert row_of(tokenizer, TWO_TURNS[:3]) == row_of(tokenizer, TWO_TURNS[:2])


def test_the_mask_token_in_an_answer_drops_the_row_and_in_a_question_does_not() -> None:
    chat = open_chat(make_tokenizer(), stop_ids=STOP, mask_token_id=3)
    asked = [{"role": "user", "content": "What is <|MASK|>?"}, {"role": "assistant", "content": "A placeholder."}]
    assert token_rows(chat, Conversation(id="x", messages=asked)).rows[0].input_ids.count(3) == 1
    answered = [asked[0], {"role": "assistant", "content": "<|MASK|> is one."}]
    with pytest.raises(Unprovable, match="the drafter's mask token inside an answer"):
        token_rows(chat, Conversation(id="x", messages=answered))


def test_generated_ids_are_used_as_they_are() -> None:
    """The target wrote "Eleven" letter by letter; the next turn's prompt has the ids that a server makes of its text."""
    tokenizer = make_tokenizer()
    chat = open_chat(tokenizer, stop_ids=STOP)
    spelled = [tokenizer.encode(letter)[0] for letter in "Eleven."] + [IM_END]
    tokenized = tokenizer.encode("Eleven.<|im_end|>")
    assert spelled != tokenized
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "Eleven."}, *TWO_TURNS[2:]]
    plain = token_rows(chat, Conversation(id="x", messages=messages))
    same = [messages[0], {**messages[1], "token_ids": tokenized}, *messages[2:]]
    assert token_rows(chat, Conversation(id="x", messages=same)) == plain
    other = Conversation(id="x", messages=[messages[0], {**messages[1], "token_ids": spelled}, *messages[2:]])
    rendered = token_rows(chat, other)
    prompt = tokenizer.encode(render(tokenizer, messages[:1], generation_prompt=True))
    assert [row.id for row in rendered.rows] == ["x/turn-1", "x/turn-3"]
    assert rendered.rows[0].input_ids == prompt + spelled
    assert rendered.rows[0].loss_mask == [0] * len(prompt) + [1] * len(spelled)
    assert rendered.rows[1].input_ids == plain.rows[0].input_ids
    assert supervised(tokenizer, rendered.rows[1]) == [TWO_TURNS[3]["content"] + "<|im_end|>"]
    assert rendered.notes == ("token_ids differ from the tokenization of their text",)
    assert check_as_served(chat, other, rendered) == {1: True, 3: True}


def test_a_row_that_came_as_tokens_is_checked_and_passed_through() -> None:
    chat = open_chat(make_tokenizer(), stop_ids=STOP)

    def given(mask: list[int] | None) -> Rendered:
        return token_rows(chat, Conversation(id="F34", messages=[], input_ids=[5, 6, 7, 8], loss_mask=mask))

    assert given([0, 0, 1, 1]) == Rendered(
        rows=(TokenRow(id="F34", input_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1, 1]),), method="tokens"
    )
    with pytest.raises(Unprovable, match="loss_mask has another length than input_ids"):
        given([0, 0, 1])
    with pytest.raises(Unprovable, match="loss_mask has another length than input_ids"):
        given(None)
    with pytest.raises(Unprovable, match="loss_mask holds other values than 0 and 1"):
        given([0, 0, 2, 1])


def test_a_batch_gives_what_its_rows_give_alone_and_reasons_in_place() -> None:
    chat = open_chat(make_tokenizer(), stop_ids=STOP)
    rows = [Conversation(id=row["id"], messages=row["messages"]) for row in chats(9)]
    rows.insert(4, Conversation(id="bad", messages=TWO_TURNS[:1]))
    batch = token_rows_batch(chat, rows)
    assert str(batch.pop(4)) == "no assistant turn"
    assert batch == [token_rows(chat, row) for row in rows if row.id != "bad"]


@pytest.mark.parametrize(("mask", "longest"), [([], 0), ([0, 0], 0), ([1], 1), ([0, 1, 1, 0, 1], 2), ([1, 0, 1, 1, 1], 3)])
def test_longest_run(mask: list[int], longest: int) -> None:
    assert longest_run(mask) == longest


def test_tokens_that_merge_across_the_prompts_end_are_split_as_served() -> None:
    """The prompt ends in a space, which the tokenizer joins to the answer's first word."""
    tokenizer = make_tokenizer(
        CHATML.replace("message['role'] + '\\n'", "message['role'] + ': '").replace("assistant\\n'", "assistant: '")
    )
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "is it?"}]
    rendered = rows_of(tokenizer, messages)
    (row,) = rendered.rows
    prompt = tokenizer.encode(render(tokenizer, messages[:1], generation_prompt=True), add_special_tokens=False)
    answer = tokenizer.encode("is it?<|im_end|>", add_special_tokens=False)
    end = tokenizer.encode("\n", add_special_tokens=False)
    assert row.input_ids == prompt + answer + end != tokenizer.encode(render(tokenizer, messages, generation_prompt=False))
    assert row.loss_mask == [0] * len(prompt) + [1] * len(answer) + [0] * len(end)
    assert rendered.notes == ("tokens merge at the end of a served prompt",)
