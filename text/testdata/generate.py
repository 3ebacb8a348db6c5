#!/usr/bin/env python3
"""Writes the golden vectors of package text.

Oracles: Hugging Face tokenizers and jinja2, the latter set up as transformers does.

    pip install tokenizers==0.23.3 jinja2==3.1.6 [gguf]
    python generate.py                               # tiny.json.gz, templates.json.gz
    python generate.py --cache ~/.cache/baton        # also NAME.json.gz for each real tokenizer found
    python generate.py --count 5000 --out DIR        # a larger comparison: go test -vectors DIR

The cache is what scripts/fetch-tokenizers fills.
"""

import argparse, gzip, hashlib, json, os, pathlib, random, unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
QWEN_MARKS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UP}*{LOW}+%s|[^\r\n\p{{L}}\p{{N}}]?{UP}+{LOW}*%s"
O200K = CASED % (SUFFIX, SUFFIX) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")

PIECES = [
    "hello", "World", "HELLO", "helloWorld", "XMLHttpRequest", "don't", "DON'T", "we'll", "I'M", "it'ſ", "'Re", "''s", "'", "’s",
    "naïve", "nai\u0308ve", "e\u0301\u0323", "\u0301", "a" + "\u0300\u0316" * 20, "Å", "A\u030a", "ﬁ", "ẛ\u0323", "ǅungla", "ʰa", "ªº",
    "한국어", "\u1112\u1161\u11ab", "日本語", "カタカナ", "ひらがな", "中文字符", "ไทย", "हिन्दी", "עברית", "العَرَبِيَّة", "\u202eRTL\u202c", "Ελληνικά", "ΣΊΣΥΦΟΣ", "Привет", "ЁЖ",
    "👍", "👍🏽", "👨‍👩‍👧‍👦", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🇫🇷", "❤️", "☺︎", "1️⃣", "½", "Ⅷ", "²", "٣٤٥", "१२३", "1", "12", "123", "1234567890", "3.14159", "1,000,000", "0x1F", "1e-9",
    " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", " \r\n\t ", "\u00a0", "\u2003", "\u3000", "\u200b", "\u2028", "\u0085", "\v", "\f", "\u1680", "\ufeff",
    "\x00", "\x01", "\x1b[0m", "\x7f", "\u0080", "\ufffd", "\ufffe", "\U0010ffff", "\ue000", "\U000e0001", "\u0378", "\u00ad", "\u2060",
    "foo(bar)", "a[i]+=b*c;", "if (x<=y && !z) {", "}", "/* c */", "//", "///", "#include <stdio.h>", "def f(x):\n    return x", "</div>", "<br/>", "$HOME/.cfg", "C:\\dir\\f.txt",
    "https://example.com/a?b=c&d=%20#e", "user@example.com", "_under_score", "kebab-case", "--flag=1", "...", "!!!", "?!", "—", "“q”", "«»", "、。", "¿", "€", "£5", "±", "∑", "→", "~~~", "```py\n", "|", "||",
    "<|im_start|>", "<|im_end|>", "<|im_", "im_end|>", "<|eot_id|>", "<|endoftext|>", "<|begin_of_text|>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "<tool_call>", "<s>", "</s>", "<unk>", "[INST]", "<|", "|>", "<", ">",
    "ſ", "ß", "SS", "ı", "İ", "K", "Ω", "Ⱥ", "\U00010400", "\U0001d400", "\U0001e900", "𓀀", "㍿", "Ꭰ", "ꭰ", "ლ", "Ა", "\u0345", "ͺ", "▁", "▁▁", "Ġ", "Ċ", "Ã©",
    "The quick brown fox", " jumps over", "the lazy dog.", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "=" * 70, "-" * 33, "ababababababababababababababababababababab", "Donaudampfschifffahrtsgesellschaft",
]


def ugly(rng, count):
    """Strings that tokenizers get wrong: every piece alone, random joins, random characters."""
    out = ["", *PIECES]
    while len(out) < count:
        kind = rng.random()
        if kind < 0.6:
            out.append(rng.choice(["", "", " ", "\n"]).join(rng.choice(PIECES) for _ in range(rng.randint(2, 9))))
        elif kind < 0.8:
            out.append("".join(rng.choice(["a", "B", "1", " ", "'", "s", "\n", "\u0301", "é", "中", ".", "\r", "/", "ʰ", "😀", "\t"]) for _ in range(rng.randint(1, 24))))
        elif kind < 0.9:
            out.append("".join(chr(c) for c in (rng.randint(0, 0x2FFF) for _ in range(rng.randint(1, 12)))))
        else:
            out.append("".join(chr(c) for c in (rng.randint(0, 0x10FFFF) for _ in range(rng.randint(1, 8))) if not 0xD800 <= c < 0xE000))
    return out[:count]


# Characters whose category changed lately, which makes an oracle with other Unicode tables disagree.
def assigned(s):
    return all(unicodedata.category(c) != "Cn" or ord(c) in (0x378, 0xFFFE, 0x10FFFF) for c in s)


def vectors(tok, rng, count, ids=True):
    encode = []
    for s in ugly(rng, count):
        if not assigned(s):
            continue
        encode.append([s, tok.encode(s, add_special_tokens=False).ids, tok.encode(s).ids])
    decode = []
    size = tok.get_vocab_size()
    for i in range(count // 4):
        some = [rng.randrange(size) for _ in range(rng.randint(1, 12))]
        if i % 2:  # a real text, cut anywhere
            whole = rng.choice(encode)[2]
            some = whole[: rng.randint(0, len(whole))]
        decode.append([some, tok.decode(some, skip_special_tokens=False), tok.decode(some, skip_special_tokens=True)])
    tok.encode_special_tokens = True
    plain = [[s, tok.encode(s, add_special_tokens=False).ids] for s, _, _ in encode if "<" in s or "[" in s]
    tok.encode_special_tokens = False
    return {"encode": encode, "plain": plain, "decode": decode}


def write(path, value):
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{path}: {path.stat().st_size} bytes")


def corpus(rng):
    for _ in range(300):
        yield rng.choice(["", " ", "\n", ", "]).join(rng.choice(PIECES) for _ in range(12))


def train(byte_level):
    tok = Tokenizer(models.BPE(byte_fallback=not byte_level, unk_token=None if byte_level else "<unk>"))
    if byte_level:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    else:
        tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
        tok.normalizer = normalizers.Replace(" ", "▁")
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, limit_alphabet=90, show_progress=False)
    tok.train_from_iterator(corpus(random.Random(7)), trainer)
    model = json.loads(tok.to_str())["model"]
    return model["vocab"], [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]


def split(regex, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(regex), behavior, invert)


def tiny():
    """Small tokenizers, one for each thing that a tokenizer.json can ask for."""
    vocab, merges = train(True)
    flat = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    control = [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>")]

    def make(pre, added=control, normalizer=None, template=None, **options):
        tok = Tokenizer(models.BPE(dict(vocab), list(merges), **options))
        tok.pre_tokenizer, tok.decoder = pre, decoders.ByteLevel()
        if normalizer:
            tok.normalizer = normalizer
        for a in added:
            (tok.add_special_tokens if a.special else tok.add_tokens)([a])
        if template:
            tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template(tok)])
        return tok

    def around(single):
        def template(tok):
            names = ["<|begin_of_text|>", "<|endoftext|>"]
            return processors.TemplateProcessing(single=single, special_tokens=[(n, tok.token_to_id(n)) for n in names])
        return template

    seq = pre_tokenizers.Sequence
    odd = [
        AddedToken("<|im_", normalized=False), AddedToken("<|im_end|>", special=True, normalized=False), AddedToken("<think>", normalized=False, lstrip=True),
        AddedToken("</think>", normalized=False, rstrip=True), AddedToken("fox", normalized=False, single_word=True), AddedToken("Ελληνικά", normalized=True),
        AddedToken("e\u0301\u0323", normalized=True), AddedToken("<s>", special=True, normalized=True, lstrip=True, rstrip=True),
        AddedToken("hello", normalized=True, single_word=True), AddedToken("<｜User｜>", normalized=True), AddedToken("日本", normalized=False),
    ]
    out = {
        "gpt2": make(pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "gpt2-prefix": make(pre_tokenizers.ByteLevel(add_prefix_space=True), template=around("$A <|endoftext|>")),
        "llama": make(seq([split(LLAMA), flat]), ignore_merges=True, template=around("<|begin_of_text|> $A")),
        "qwen": make(seq([split(QWEN), flat]), normalizer=normalizers.NFC()),
        "qwen-marks": make(seq([split(QWEN_MARKS), flat]), normalizer=normalizers.NFC()),
        "o200k": make(seq([split(O200K), flat])),
        "tekken": make(seq([split(TEKKEN), flat]), template=around("<|begin_of_text|> $A <|endoftext|>")),
        "deepseek": make(seq([split(r"\p{N}{1,3}"), split(CJK), split(DEEPSEEK), flat])),
        "smollm": make(seq([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
        "digit-runs": make(seq([pre_tokenizers.Digits(individual_digits=False), flat])),
        "falcon": make(seq([split(r"[\p{P}\$\+<=>\^~\|`]+", "contiguous"), split("[0-9][0-9][0-9]"), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
        "possessive": make(seq([split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?(?:[^\s\p{L}\p{N}])++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"), flat])),
        "words": make(seq([split(r"\b\w+\b|[^\w\s]+|\W"), flat])),
        "nothing": make(flat),
        "removed": make(seq([split(r"\s+", "removed"), flat])),
        "previous": make(seq([split(r"[aeiou]", "merged_with_previous"), flat])),
        "next": make(seq([split(r"[aeiou]", "merged_with_next"), flat])),
        "inverted": make(seq([split(r"\w+|[^\w\s]+", "removed", True), flat])),
        "contiguous": make(seq([split(r"[^\S\n]|\d", "contiguous"), flat])),
        "literal": make(seq([pre_tokenizers.Split("ab", "isolated"), flat])),
        "nfd": make(flat, normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.Replace("e", "E"), normalizers.Replace(Regex(r"\s\s+"), " ")])),
        "nfkc": make(flat, normalizer=normalizers.NFKC()),
        "added": make(seq([split(LLAMA), flat]), added=odd, normalizer=normalizers.NFC()),
        "added-many": make(pre_tokenizers.ByteLevel(add_prefix_space=True), added=odd),
    }
    del vocab["!"]
    gone = [m for m in merges if "!" in m[0] + m[1]]
    merges = [m for m in merges if m not in gone]
    for m in gone:
        vocab.pop(m[0] + m[1], None)
    out["missing-byte"] = make(flat)

    chars, pairs = train(False)
    for name, options, fixed in [
        ("fallback", dict(byte_fallback=True, fuse_unk=True, unk_token="<unk>"), True), ("unknown", dict(fuse_unk=True, unk_token="<unk>"), False),
        ("unknown-each", dict(unk_token="<unk>"), False),
    ]:
        tok = Tokenizer(models.BPE(dict(chars), list(pairs), **options))
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
        tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tok.token_to_id("<s>"))])
        out[name] = tok
    return out


def gguf_field(path, key):
    from gguf import GGUFReader

    return GGUFReader(path).fields[key].contents()


def from_gguf(path):
    field = lambda k: gguf_field(path, "tokenizer.ggml." + k)
    assert field("pre") == "smollm", field("pre")
    tokens, kinds = field("tokens"), field("token_type")
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in field("merges")]))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds) if k == 3])
    return tok


def chats(tok, source, special, rng, count):
    """Whole prompts: rendered by jinja2 and encoded at once. Contents hold no look-alikes."""
    import templates

    template, out, texts = templates.environment().from_string(source), [], [s for s in ugly(rng, 500) if "<|" not in s and assigned(s)]
    for _ in range(count):
        roles = rng.choice([["user"], ["system", "user"], ["user", "assistant", "user"]])
        messages = [{"role": r, "content": rng.choice(texts)} for r in roles]
        text = template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **special)
        out.append([messages, text, tok.encode(text, add_special_tokens=False).ids])
    return out


def real(cache, out, count):
    for path in sorted(cache.glob("**/*")):
        prompts = []
        if path.name == "tokenizer.json":
            name, tok = path.parent.name, Tokenizer.from_file(str(path))
            config = json.loads((path.parent / "tokenizer_config.json").read_text())
            if config.get("add_bos_token"):  # as transformers' LlamaTokenizerFast
                bos = config["bos_token"]
                bos = bos if isinstance(bos, str) else bos["content"]
                tok.post_processor = processors.TemplateProcessing(single=bos + " $A", special_tokens=[(bos, tok.token_to_id(bos))])
        elif path.suffix == ".gguf" and "SmolLM2" in path.name:
            name, tok = "smollm2", from_gguf(str(path))
            prompts = chats(tok, gguf_field(path, "tokenizer.chat_template"), {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, random.Random(name), count // 5)
        else:
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        write(out / f"{name}.json.gz", {"name": name, "sha256": digest, "chats": prompts, "vectors": vectors(tok, random.Random(name), count)})


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cache", type=pathlib.Path)
    p.add_argument("--out", type=pathlib.Path, default=HERE)
    p.add_argument("--count", type=int, default=300)
    p.add_argument("--templates", type=pathlib.Path, help="a folder of .jinja files, instead of the ones in templates.py")
    p.add_argument("--skip-templates", action="store_true")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, tok in tiny().items():
        made[name] = {"tokenizer": json.loads(tok.to_str()), "vectors": vectors(tok, random.Random(name), a.count)}
    write(a.out / "tiny.json.gz", made)
    if a.cache:
        real(a.cache, a.out, a.count)
    if not a.skip_templates:
        import templates

        write(a.out / "templates.json.gz", templates.cases(a.templates))


if __name__ == "__main__":
    main()
