"""The shapes that conversations come in, each turned into the fields of a `Conversation`.

shape        a row of it                                                              becomes
messages     {"messages": [{"role", "content", "tool_calls"?}], "tools"?}             messages, tools
sharegpt     {"conversations": [{"from", "value"}], "system"?, "tools"?}              messages, tools
turns        [{"role", "content"}] or [{"from", "value"}]                             messages
instruction  {"instruction", "input"?, "output", "system"?, "history"?}               messages
prompt       {"prompt": text or messages, "response" | "completion" | "chosen"}       messages
text         {"text"}, rendered already                                               text
tokens       {"input_ids", "loss_mask"}                                               input_ids, loss_mask

What cannot be used raises `Unusable` with the reason to drop the row by.
"""

import json
from collections.abc import Mapping
from typing import Any

KNOWN_ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    **{role: role for role in KNOWN_ROLES},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
CALLS = ("function_call", "tool_call")  # ShareGPT's roles of an assistant that calls a tool
RESPONSES = ("response", "completion", "chosen")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
TEXT_PARTS = ("text", "input_text", "output_text")
NOT_OF_THE_TEXT = ("finish_reason", "weight", "loss_mask")  # about a message, not in it; `_trained` keeps the flag


class Unusable(ValueError):
    """A row that cannot become a conversation; the message is the reason to drop it by."""


def row_shape(row: Any) -> str:
    """The shape of a row by its columns, the first of the table above that fits."""
    if isinstance(row, list):
        return "turns"
    if not isinstance(row, dict):
        raise Unusable("no messages")
    if "messages" in row or "conversations" in row:
        return "messages" if "messages" in row else "sharegpt"
    if "input_ids" in row:
        return "tokens"
    if "instruction" in row:
        return "instruction"
    if any(name in row for name in ("prompt", *RESPONSES)):
        return "prompt"
    if "text" in row:
        return "text"
    raise Unusable("no messages")


def fields(row: Any, shape: str, roles: Mapping[str, str]) -> dict[str, Any]:
    """`{"messages": [...], "tools": [...]}`, or text, or input_ids and loss_mask, of a row without nulls.

    `shape` is one of the table's or "auto"; `roles` are the names that the config adds.
    """
    found = row_shape(row)
    if shape not in ("auto", found) and not _fits(row, shape):
        raise Unusable(f"no row of shape {shape}")
    shape = found if shape == "auto" else shape
    if shape == "turns":
        return {"messages": [message(turn, roles) for turn in row]}
    if any(row.get(name) for name in MEDIA):
        raise Unusable("multimodal")
    if shape == "text":
        return {"messages": [], "text": _text(row["text"])}
    if shape == "tokens":
        return {"messages": [], **_tokens(row)}
    if shape == "instruction":
        turns = _instruction_turns(row)
    elif shape == "prompt":
        turns = _prompt_turns(row)
    else:
        turns = row["messages" if shape == "messages" else "conversations"]
        if not isinstance(turns, list):
            raise Unusable("no messages")
    if not turns:
        raise Unusable("empty messages")
    messages = [message(turn, roles) for turn in turns]
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, message({"role": "system", "content": row["system"]}, roles))
    said = {"messages": messages, "tools": tools(row.get("tools"))}
    options = row.get("chat_template_kwargs")
    if isinstance(options, dict) and isinstance(options.get("enable_thinking"), bool):
        said["thinking"] = options["enable_thinking"]
    return said


def _fits(row: Any, shape: str) -> bool:
    column = {"messages": "messages", "sharegpt": "conversations", "tokens": "input_ids"}.get(shape, shape)
    return isinstance(row, dict) and (column in row or (shape == "prompt" and any(name in row for name in RESPONSES)))


# ---- messages --------------------------------------------------------------------------------------------------------


def message(turn: Any, roles: Mapping[str, str]) -> dict[str, Any]:
    """One turn in OpenAI's words, its content one string; keys that are not known stay."""
    if not isinstance(turn, dict):
        raise Unusable("message is no object")
    own = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value", *NOT_OF_THE_TEXT)}
    name = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    role = roles.get(name) or ALIASES.get(name) if isinstance(name, str) else None
    if role is None and name in CALLS:
        role, content, own["tool_calls"] = "assistant", None, content
    if role is None:
        raise Unusable(f"unknown role {str(name)[:40]!r}" if isinstance(name, str) else f"unknown role {str(name)[:40]}")
    if own.get("tool_calls"):
        own["tool_calls"] = [_call(call) for call in _parsed(own["tool_calls"], "broken tool call")]
    else:
        own.pop("tool_calls", None)
    if content is None and role == "assistant" and (own.get("tool_calls") or own.get("reasoning_content")):
        content = ""
    if role == "assistant":
        own |= _trained(turn)
    return {"role": role, "content": _text(content), **own}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise Unusable("content is no text")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS:
            raise Unusable("multimodal")
        if not isinstance(text, str):
            raise Unusable("content is no text")
        texts.append(text)
    return "".join(texts)


def _trained(turn: Mapping[str, Any]) -> dict[str, int]:
    """The flag of a turn that is not to be trained: `loss_mask`, or `weight` in OpenAI's fine-tuning files."""
    flag = turn.get("loss_mask", turn.get("weight", 1))
    if flag not in (0, 1):
        raise Unusable("a message's loss_mask or weight is neither 0 nor 1")
    return {} if flag else {"loss_mask": 0}


def _call(call: Any) -> dict[str, Any]:
    """A tool call in OpenAI's form; arguments stay the text or mapping that they are."""
    if not isinstance(call, dict):
        raise Unusable("broken tool call")
    if "function" not in call:
        call = {"type": "function", "function": call}
    if not isinstance(call["function"], dict) or not isinstance(call["function"].get("name"), str):
        raise Unusable("broken tool call")
    return call


def tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool definitions in OpenAI's form, from a list, one definition, or either as JSON text ("null" and "" are none)."""
    if not value or value == "null":
        return None
    found = []
    for tool in _parsed(value, "broken tools"):
        if not isinstance(tool, dict):
            raise Unusable("broken tools")
        found.append(tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool})
    return found or None


def _parsed(value: Any, fault: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = without_nulls(json.loads(value), columnar=False)
        except (ValueError, RecursionError) as error:
            raise Unusable(fault) from error
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise Unusable(fault)
    return value


# ---- the other shapes ------------------------------------------------------------------------------------------------


def _instruction_turns(row: Mapping[str, Any]) -> list[Any]:
    history = row.get("history", [])
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise Unusable("history is no list of pairs")
    turns = [turn for pair in history for turn in _pair(*pair)]
    question = "\n".join(_text(row[name]) for name in ("instruction", "input") if row.get(name))
    return turns + _pair(question, row.get("output", row.get("response")))


def _pair(question: Any, answer: Any) -> list[Any]:
    asked = [{"role": "user", "content": question}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


def _prompt_turns(row: Mapping[str, Any]) -> list[Any]:
    """A response that is a conversation from its start, as in preference data, stands alone."""
    prompt = row.get("prompt", [])
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    response: Any = next((row[name] for name in RESPONSES if name in row), [])
    answers = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
    if not isinstance(turns, list) or not isinstance(answers, list):
        raise Unusable("prompt or response is neither text nor messages")
    whole = answers and isinstance(answers[0], dict) and answers[0].get("role") != "assistant"
    if answers and not turns and not whole:
        raise Unusable("no prompt")
    return answers if whole else turns + answers


def _tokens(row: Mapping[str, Any]) -> dict[str, list[int]]:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise Unusable("input_ids are no token ids")
    if not isinstance(mask, list):
        raise Unusable("input_ids without loss_mask")
    if len(mask) != len(ids):
        raise Unusable("input_ids and loss_mask differ in length")
    if not all(flag in (0, 1) for flag in mask):
        raise Unusable("loss_mask holds other values than 0 and 1")
    return {"input_ids": ids, "loss_mask": [int(flag) for flag in mask]}


# ---- nulls -----------------------------------------------------------------------------------------------------------

MEANT = ("arguments", "parameters")  # in JSON, a null in these is a value that someone wrote


def without_nulls(value: Any, *, columnar: bool) -> Any:
    """The value without keys whose value is null: an optional field that a loader filled in is as if absent.

    Nulls within a tool call's arguments and a tool's parameters stay where they were written in JSON; in Parquet and Arrow
    (`columnar`) a schema fills them in there too, and they go.
    """
    if isinstance(value, dict):
        return {
            key: own if key in MEANT and not columnar else without_nulls(own, columnar=columnar)
            for key, own in value.items()
            if own is not None
        }
    if isinstance(value, list):
        return [without_nulls(own, columnar=columnar) if isinstance(own, dict | list) else own for own in value]
    return value
