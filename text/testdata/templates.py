"""Chat templates and what jinja2, set up as transformers sets it up, makes of them (see generate.py)."""

import copy, datetime, json, pathlib

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2026, 3, 7, 9, 5, 8)


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("same"), [], [], body).set_lineno(line)

    def same(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda f: NOW.strftime(f)
    return env


SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather <now> & \"here\".\nCafé 🌧", "parameters": {
        "type": "object", "properties": {"zip": {"type": "string"}, "city": {"type": "string", "enum": ["Paris", "Zürich"]}, "days": {"type": "integer", "default": 3},
        "a": {"type": "number", "default": 0.1}, "strict": {"type": "boolean", "default": False}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}},
]

CHATS = {
    "user": dict(messages=[{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True),
    "system": dict(messages=[
        {"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": "Hi “there” 👋🏽\n\n"}, {"role": "assistant", "content": "Hello.\n"},
        {"role": "user", "content": "<b>2 < 3</b> & 'q' {{ x }} {% y %}"}], add_generation_prompt=True),
    "no-prompt": dict(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": " d "}],
                      add_generation_prompt=False),
    "tools": dict(messages=[
        {"role": "system", "content": "Use tools."}, {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"zip": "8001", "city": "Zürich", "days": 2, "x": [1, 2.5, None, True, {"k": "v"}]}}}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "{\"rain\": \"yes\"}"}, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "Thanks"}],
        tools=TOOLS, add_generation_prompt=True),
    "extra": dict(messages=[{"role": "user", "content": "1 + 1"}], add_generation_prompt=True, enable_thinking=False, reasoning_effort="high", n=3, documents=[{"title": "T", "text": "x\ny"}]),
    "bad-roles": dict(messages=[{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "second"}, {"role": "alien", "content": "?"}], add_generation_prompt=True),
}

LANGUAGE = r"""
plain|no tags at all
newline|ends with one{{ "" }}

whitespace|  {% if true %}  
   a  
  {%- if true -%}   b   {%- endif %}

 {{ "c" }}  
{#- comment -#}  d {# e #}
  {# alone #}
f {%+ if true +%}
 g
{% endif %}{% endif %} h {{- " i " -}} j
raw|a {% raw %}{{ not }} {% an %} {# expression #}{% endraw %} b{% raw -%}  c {%- endraw %}
brace|{ {% if true %}{{ "{" }}{% endif %}{ {#- c #}% { {%- if true %}{% endif %}
expression-trim|foo {{ "x" }}{%- if true %} y {% endif %} bar {{ "z" }} {%- if true %} w{% endif %}
loop|{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ " first" if loop.first }}{{ " last" if loop.last }} {{ m.role }};{% else %}none{% endfor %}
loop-filter|{% for m in messages if m.role == "user" %}{{ loop.index0 }}{{ m["content"] | trim }}|{% endfor %}{% for x in [] %}{% else %}empty{% endfor %}
loop-control|{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
loop-scope|{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}
loop-recursive|{% for n in [{"v": 1, "c": [{"v": 2, "c": []}]}, {"v": 3, "c": []}] recursive %}{{ n.v }}[{{ loop(n.c) }}]{% endfor %}
items|{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for k in messages[0] %}{{ k }},{% endfor %}{{ messages[0].keys() | list }}
namespace|{% set ns = namespace(a=0, b="") %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b ~ i %}{% endfor %}{{ ns.a }}{{ ns.b }}
macro|{% macro f(a, b="x", c=none) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, c=2) }}{{ f("p", "q", "r") }}{% macro g() -%} {{ f(0) }} {%- endmacro %}{{ g() }}
macro-recursive|{% macro t(n) %}{{ n }}{% if n > 0 %}({{ t(n - 1) }}){% endif %}{% endmacro %}{{ t(4) }}
macro-varargs|{% macro f(a) %}{{ a }}:{{ varargs | join("+") }}:{{ kwargs["k"] }}{% endmacro %}{{ f(1, 2, 3, k=4) }}
call|{% macro box(w) %}<{{ w }}>{{ caller() }}</{{ w }}>{% endmacro %}{% call box("b") %}in{% endcall %}
set-block|{% set x %}  a{{ 1 }}
b{% endset %}[{{ x }}]
filter-block|{% filter upper %}abc {{ "d" }}{% endfilter %}
conditions|{{ 1 if tools else 2 }}{{ tools is none }}{{ tools is defined }}{{ nothing is defined }}{{ nothing | default("d") }}{{ "" | default("e", true) }}{{ not none }}
tests|{{ 1 is number }}{{ "a" is string }}{{ [] is iterable }}{{ {} is mapping }}{{ messages is sequence }}{{ 3 is odd }}{{ none is none }}{{ true is true }}{{ 4 is divisibleby(2) }}{{ "b" in "abc" }}{{ 2 not in [1] }}
operators|{{ 7 // 2 }}{{ 7 / 2 }}{{ 7 % 3 }}{{ -7 // 2 }}{{ 2 ** 5 }}{{ "a" ~ 1 ~ none ~ true }}{{ "ab" * 2 }}{{ [1] + [2] }}{{ 1 < 2 < 3 }}{{ 1 == 1.0 }}{{ "a" < "b" }}
values|{{ none }} {{ true }} {{ 1.0 }} {{ 1e20 }} {{ 0.1 + 0.2 }} {{ [1, "a", none] }} {{ {"k": "v\n'"} }} {{ "é" }} {{ [] }}
strings|{{ "Hello World".upper() }}{{ " x ".strip() }}{{ "a,b,,c".split(",") }}{{ "a b  c".split() }}{{ "abc".startswith("ab") }}{{ "aXbXc".replace("X", "-") }}{{ "abc"[1:] }}{{ "abc"[-1] }}{{ "abc"[::-1] }}{{ "aab".lstrip("a") }}{{ "title case".title() }}{{ "abcabc".find("b") }}{{ "abcabc".count("b") }}
split-limit|{{ "a</think>b</think>c".split("</think>")[-1] }}{{ "a b c".split(" ", 1) }}{{ "<think>\nx\n</think>\n\ny".split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n") }}
filters|{{ [3, 1, 2] | sort | join(",") }}{{ "a b" | length }}{{ [1, 2] | first }}{{ [1, 2] | last }}{{ " q " | trim }}{{ "ab" | capitalize }}{{ "<&>" | e }}{{ [1, 2, 3] | sum }}{{ ["a", "b"] | map("upper") | join }}{{ messages | map(attribute="role") | join(" ") }}{{ messages | selectattr("role", "equalto", "user") | list | length }}{{ [1, [2]] | string }}{{ 3.7 | int }}{{ "5" | int + 1 }}{{ [1, 1, 2] | unique | list }}{{ ({"b": 1, "a": 2} | dictsort)[0][0] }}{{ "x\ny" | indent(2) }}{{ 2.567 | round(1) }}{{ -3 | abs }}{{ "abc" | reverse }}{{ [1, 2, 3] | reject("odd") | list }}
json|{{ {"b": 1, "a": [1, 2.0, none, true, "é<>&'\"\\\n\u007f"], "c": {}} | tojson }}{{ [] | tojson }}{{ {"x": [1, {"y": []}]} | tojson(indent=2) }}{{ [1, 2] | tojson(separators=(",", ":")) }}{{ {"b": 1, "a": 2} | tojson(sort_keys=true) }}{{ "é" | tojson(ensure_ascii=true) }}
tools|{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ tools | tojson(indent=4) }}{% endif %}
dates|{{ strftime_now("%d %b %Y|%B %d, %Y|%Y-%m-%d %H:%M:%S|%A %a %j %y %I %p|%%|%e|%U %W %u %w|%D %T %R") }}
raise|{% if messages[0].role != "user" %}{{ raise_exception("Conversation roles must start with user, not " ~ messages[0].role) }}{% endif %}ok
generation|{% for m in messages %}{% if m.role == "assistant" %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}({{ m.content }}){% endif %}{% endfor %}
arguments|{{ enable_thinking is defined }}{{ enable_thinking }}{{ reasoning_effort | default("low") }}{% if n %}{{ n + 1 }}{% endif %}{{ documents | tojson }}{{ bos_token }}{{ pad_token is defined }}
chatml|{% for message in messages %}{{ "<|im_start|>" + message["role"] + "\n" + message["content"] | trim + eos_token + "\n" }}{% endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
indented|{{- bos_token }}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = "" %}
    {%- endif %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.function %}
                {%- set call = call.function %}
            {%- endif %}
            {{- "<tool_call>\n{\"name\": \"" }}
            {{- call.name }}
            {{- "\", \"arguments\": " }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- "}\n</tool_call>" }}
        {%- endfor %}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
{%- endfor %}
""".strip("\n")


def language():
    """The templates above: a name, a bar and the source, which goes on until the next such line."""
    name, source, out = None, [], {}
    for line in LANGUAGE.split("\n"):
        head, bar, rest = line.partition("|")
        if bar and head.replace("-", "").isalpha() and head == head.lower() and head not in out and len(head) < 20:
            if name:
                out[name] = "\n".join(source)
            name, source = head, [rest]
        else:
            source.append(line)
    out[name] = "\n".join(source)
    out["crlf"] = "a\r\n{% if true %}\r\n  b\r\n{% endif %}\r\nc\r\n"
    out["broken"] = "{% for m in messages %}{{ m.role }}"
    out["unclosed"] = "a {{ b"
    return out


def cases(folder=None):
    env = environment()
    sources = language()
    if folder:
        sources = {p.name: p.read_text() for p in sorted(pathlib.Path(folder).glob("*.jinja"))}
    templates = []
    for name, source in sources.items():
        outputs = {}
        for chat, context in CHATS.items():
            full = {"tools": None, "documents": None, **SPECIAL, **copy.deepcopy(context)}
            try:
                outputs[chat] = env.from_string(source).render(**full)
            except Exception as e:
                outputs[chat] = None
        templates.append({"name": name, "source": source, "outputs": outputs})
    return {"now": NOW.isoformat() + "Z", "special": SPECIAL, "chats": CHATS, "templates": templates}
