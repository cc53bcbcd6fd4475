"""Records what transformers' apply_chat_template makes of small templates.

Run by hand, in an environment with transformers:

    python tests/oracle/record_templates.py

templates.json holds for each the template, the messages, what else is given, and the text, or the
name of the error. Each tries something that a template may use: variables and their values where
nothing is given, filters, globals, blocks, scopes, what is null.
"""

# ruff: noqa: E501 - templates are as long as they are

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers

HERE = Path(__file__).resolve().parent
USER: dict[str, Any] = {"role": "user", "content": " Hi <b>&'\"é \n"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": "é"}}}
    ],
}
TOOL: dict[str, Any] = {"role": "tool", "name": "f", "content": '{"x": [1, 2]}'}
THINKING: dict[str, Any] = {"role": "assistant", "content": "ok", "reasoning": "because"}
TOOLS = [{"type": "function", "function": {"name": "g", "description": "<d>", "parameters": {}}}]
VALUE = {"b": [1, 2.5, None, True], "a": {"é": "<'&\">"}, "c": []}

CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("{% if tools is not none %}[TOOLS]{% endif %}{{ messages[0].content }}", [USER], {}),
    ("{% if tools is defined %}d{% endif %}{% if tools %}t{% endif %}{{ tools }}", [USER], {}),
    ("{{ documents is none }}{{ documents }}{{ tools is none }}", [USER], {}),
    ("{{ documents is defined }}{{ x is defined }}{{ x }}", [USER], {}),
    ("{{ add_generation_prompt }}", [USER], {}),
    ("{{ add_generation_prompt }}", [USER], {"add_generation_prompt": True}),
    ("{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}", [USER],
     {"tools": TOOLS}),
    ("{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}", [USER], {}),
    ("{{ sep_token is defined }}{{ sep_token }}{{ bos_token_id is defined }}", [USER], {}),
    ("{{ bos_token }}", [USER], {"bos_token": "mine"}),
    ("{{ value | tojson }}", [USER], {"value": VALUE}),
    ("{{ value | tojson(indent=2) }}", [USER], {"value": VALUE}),
    ("{{ value | tojson(ensure_ascii=True, sort_keys=True) }}", [USER], {"value": VALUE}),
    ("{{ value | tojson(separators=(',', ':')) }}", [USER], {"value": VALUE}),
    ("{{ messages[0].content | tojson }}{{ messages | tojson }}", [USER], {}),
    ("{{ raise_exception('no ' + messages[0].role) }}", [USER], {}),
    ("{{ strftime_now is defined }}{{ dict is defined }}{{ namespace is defined }}", [USER], {}),
    ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 4 %}{% break %}{% endif %}"
     "{{ i }}{% endfor %}", [USER], {}),
    ("{% set n = namespace(a=1, b='x') %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}"
     "{{ n.a }}{{ n.b }}", [USER, ANSWER], {}),
    ("{% set n = namespace() %}{% set n._x = 1 %}{{ n._x }}", [USER], {}),
    ("{% set n = namespace(_x=1) %}{{ n._x }}", [USER], {}),
    ("{% set d = dict(a=1, b=messages[0].role) %}{{ d.b }}{{ d | tojson }}", [USER], {}),
    ("{% set d = dict.fromkeys(['a', 'b'], 0) %}{{ d }}", [USER], {}),
    ("{{ dict.__class__ }}", [USER], {}),
    ("{{ messages.append(1) }}", [USER], {}),
    ("{% generation %}{{ messages[0].role }}{% endgeneration %}|", [USER], {}),
    ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", [USER], {}),
    ("{%- for m in messages %}\n    {%- if loop.first %}\n{{ m.role }}\n    {%- endif %}\n{% endfor %}",
     [USER, ANSWER], {}),
    ("  {% if true %}\n  a\n  {% endif %}\n  b", [USER], {}),
    ("{{ messages[0].content | trim }}{{ messages[0]['content'].strip() }}|", [USER], {}),
    ("{{ messages[0].content | upper }}{{ messages[0].content | title }}", [USER], {}),
    ("{{ messages[0].content | length }}{{ messages[0].content[1:4] }}{{ messages[0].content[-1] }}",
     [USER], {}),
    ("{{ messages[1].content.split('</think>')[-1].lstrip('\\n') }}|"
     "{{ messages[1].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}",
     [USER, ANSWER], {}),
    ("{{ messages[1].content.partition('</think>')[0] }}|{{ messages[1].content.splitlines() }}",
     [USER, ANSWER], {}),
    ("{{ messages[0].content.replace('<b>', '') }}|{{ 'a-b' | replace('-', messages[0].role) }}",
     [USER], {}),
    ("{{ '%s: %s' % (messages[0].role, messages[0].content) }}", [USER], {}),
    ("{{ '{}: {}'.format(messages[0].role, 'x') }}{{ '%s!' | format(messages[0].role) }}", [USER], {}),
    ("{{ messages[0].content | e }}{{ messages[0].content | indent(2) }}", [USER], {}),
    ("{{ '<a>' + (messages[0].content | e) }}{{ (messages[0].content | e) + '<a>' }}"
     "{{ '<a>' ~ (messages[0].content | e) }}{{ '<a>' | safe + messages[0].content + '<' }}",
     [USER], {}),
    ("{{ messages | map(attribute='role') | join(', ') }}{{ messages | length }}", [USER, ANSWER], {}),
    ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", [USER, ANSWER], {}),
    ("{{ (messages | last).role }}{{ messages[::-1][0].role }}{{ messages | first }}",
     [USER, ANSWER], {}),
    ("{{ ['a', messages[0].role, 'b'] | join }}{{ 'x'.join(['1', '2']) }}", [USER], {}),
    ("{{ 'ab' * 3 }}{{ 3 * messages[0].role }}{{ messages[0].role ~ 1 ~ none }}", [USER], {}),
    ("{% macro f(a, b='B') %}[{{ a }}{{ b }}{{ caller is defined }}]{% endmacro %}{{ f('x') }}"
     "{{ f(messages[0].role, b=2) }}", [USER], {}),
    ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}{{ messages[0].role }}{% endcall %}",
     [USER], {}),
    ("{% set c %}a{{ messages[0].role }}{% endset %}{{ c | upper }}{{ c | length }}", [USER], {}),
    ("{% filter upper %}a{{ messages[0].role }}{% endfilter %}", [USER], {}),
    ("{{ messages[0].content is string }}{{ messages is iterable }}{{ messages[0] is mapping }}"
     "{{ 'us' in messages[0].role }}{{ messages[0].role == 'user' }}", [USER], {}),
    ("{{ messages[0].content is defined }}{{ messages[0].content is none }}{{ messages[0].content }}",
     [CALL], {}),
    ("{% for c in messages[0].tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
     "{{ c.function.arguments.items() | list }}{% endfor %}", [CALL], {}),
    ("{{ messages[0].name }}{{ messages[0].content | tojson }}{{ messages[0].x }}", [TOOL], {}),
    ("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}{{ messages[0].reasoning }}",
     [THINKING], {}),
    ("{{ messages[0].reasoning_content is defined }}", [USER], {}),
    ("{{ messages[0].reasoning_content }}", [THINKING | {"reasoning": None, "thinking": "t"}], {}),
    ("{{ enable_thinking is defined and enable_thinking is false }}", [USER],
     {"enable_thinking": False}),
    ("{{ nothing.at.all }}", [USER], {}),
    ("{{ messages[0].content + 1 }}", [USER], {}),
    ("{{ messages[7].role }}", [USER], {}),
    ("{% if messages[0].role != 'user' %}{{ raise_exception('x') }}{% endif %}{{ 1 / 3 }}", [USER], {}),
    ("{{ range(3) | list }}{{ lipsum is defined }}{{ cycler is defined }}{{ joiner is defined }}",
     [USER], {}),
    ("{{ messages[0].content | string | trim | default('x') }}{{ x | default('y') }}", [USER], {}),
    ("{{ value.b | sum if false else value.b | length }}{{ value | dictsort }}", [USER],
     {"value": VALUE}),
    ("{{ value.items() | list }}{{ value.keys() | list }}{{ value.get('z', 'no') }}", [USER],
     {"value": VALUE}),
    ("{{ messages[0].role.startswith('us') }}{{ messages[0].role.find('s') }}"
     "{{ messages[0].role.capitalize() }}{{ messages[0].role.isalpha() }}", [USER], {}),
]  # fmt: skip


def main() -> None:
    auto = transformers.AutoTokenizer.from_pretrained(HERE / "tokenizers" / "llama2-metaspace")
    found = []
    for template, messages, given in CASES:
        case: dict[str, Any] = {"template": template, "messages": messages, "given": given}
        try:
            case["text"] = auto.apply_chat_template(
                messages, chat_template=template, tokenize=False, **given
            )
        except Exception as error:
            case["error"] = type(error).__name__
        found.append(case)
    head = {"transformers": transformers.__version__, "tokens": auto.special_tokens_map}
    lines = ",\n".join(json.dumps(each) for each in found)
    (HERE / "templates.json").write_text(f'{{"meta":{json.dumps(head)},\n"cases":[\n{lines}\n]}}\n')
    print(f"{len(found)} templates, {sum('error' in each for each in found)} errors")


if __name__ == "__main__":
    main()
