"""Chat templates of the kinds that real models have, as small as they can be."""

from tests.fakes import CHATML

_PROMPT = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
_EACH = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
)

# T2: the answer is marked by generation tags
TAGGED = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}" + _PROMPT
)
# T6: the mark closes before the end-of-turn token
TAGGED_EARLY = TAGGED.replace(
    "{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}",
    "{{- message['content'] -}}{%- endgeneration -%}{{- '<|im_end|>' -}}",
)
# T3: strict order of roles
STRICT = (
    "{%- for message in messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('Conversation roles must alternate user/assistant') -}}"
    "{%- endif -%}"
    "{%- endfor -%}" + _EACH + _PROMPT
)
# T4: reasoning of earlier turns is dropped, the last turn always has a think block
REASONING = (
    "{%- for message in messages -%}"
    "{%- set text = message['content'].split('</think>')[-1].lstrip('\\n') -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' and loop.last -%}"
    "{%- set thought = message.reasoning_content or message['content'].split('</think>')[0].replace('<think>', '')"
    " if '</think>' in message['content'] or message.reasoning_content else '' -%}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}"
    "{%- endif -%}"
    "{{- (text if message['role'] == 'assistant' else message['content']) + '<|im_end|>\\n' -}}"
    "{%- endfor -%}" + _PROMPT
)
# T5: writes a beginning-of-text token itself
BEGINS = "{{- '<|endoftext|>' -}}" + CHATML
# T7: trims the answer
TRIMS = CHATML.replace("message['content']", "message['content'].strip()")
# T8: a default system message where none is given
DEFAULT_SYSTEM = (
    "{%- if not messages or messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}"
    "{%- endif -%}" + CHATML
)
# T9: tool arguments as a mapping
TOOL_MAPPING = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>' + call.function.name -}}"
    "{%- for key, value in call.function.arguments | items -%}{{- ' ' + key + '=' + value -}}{%- endfor -%}"
    "{{- '</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}" + _PROMPT
)
# GLM's way: no end of turn; here not even the next role stops, but the user's turn ends with the stop token
UNSTOPPED = CHATML.replace(
    "message['content'] + '<|im_end|>\\n'", "message['content'] + ('\\n' if message['role'] == 'assistant' else '<|im_end|>\\n')"
)
# only the last turn of all is stopped: in a longer render the next stop token belongs to the user
STOPS_AT_THE_END = UNSTOPPED.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and not loop.last")
# the generation prompt is no prefix of the whole render, as in GLM-4.7 or DeepSeek-V3
OTHER_PROMPT = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>'")
# the first user's text depends on how many messages there are, as with a printed count or date
COUNTING = "{{- messages | length ~ ' messages\\n' -}}" + CHATML

TEMPLATES = {
    "T1 chatml": CHATML,
    "T2 tagged": TAGGED,
    "T3 strict": STRICT,
    "T4 reasoning": REASONING,
    "T5 begins": BEGINS,
    "T6 tagged early": TAGGED_EARLY,
    "T7 trims": TRIMS,
    "T8 default system": DEFAULT_SYSTEM,
    "T9 tool mapping": TOOL_MAPPING,
    "unstopped": UNSTOPPED,
    "stops at the end": STOPS_AT_THE_END,
    "other prompt": OTHER_PROMPT,
    "counting": COUNTING,
    "counting, other prompt": COUNTING.replace(CHATML, OTHER_PROMPT),
}
