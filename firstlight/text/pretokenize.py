"""The pre-tokenizer of each byte-level BPE family: how text is cut into words before merges apply.

Knows names from `tokenizer.ggml.pre` and regular expressions, not vocabularies. A family is a list of expressions
applied one after another; each cuts what the one before it left, and what it does not match stays a piece of its own.

Source: the `pre_tokenizer` section of the published tokenizer.json of each family, and the names llama.cpp gives them
in GGUF.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from firstlight.errors import ModelError

__all__ = ["byte_level", "families", "ignores_merges", "writes_bos"]

_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTION_ANY_CASE = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TRAILING_SPACE = r"\s+(?!\S)|\s+"

_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_TRAILING_SPACE}"


def _cl100k(digits: str, letters: str = r"\p{L}", breaks: str = r"[\r\n]*") -> str:
    """The expression shared by llama 3, qwen 2 and their relatives; they differ in how many digits make a word."""
    symbol = rf"[^\s{letters}\p{{N}}]"
    return (
        rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?{symbol}+{breaks}|\s*[\r\n]+|{_TRAILING_SPACE}"
    )


def _o200k(digits: str, ending: str) -> str:
    """The expression of gpt-4o and tekken: words are cut where case changes from lower to upper."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{ending}|{lead}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_TRAILING_SPACE}"
    )


_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_PUNCTUATION_AND_TICK = r"[\p{P}\$\+<=>\^~\|`]+"
_CJK_DEEPSEEK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_TRAILING_SPACE}"
)

_DIGITS_THEN_GPT2 = [r"\p{N}", _GPT2]
_LLAMA3 = [_cl100k(r"\p{N}{1,3}")]
_QWEN2 = [_cl100k(r"\p{N}")]

_FAMILIES: dict[str, list[str]] = {
    "default": [_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "gpt-2": [_GPT2],
    "phi-2": [_GPT2],
    "mpt": [_GPT2],
    "olmo": [_GPT2],
    "jais": [_GPT2],
    "trillion": [_GPT2],
    "granite-docling": [_GPT2],
    "gigachat": [_GPT2],
    "mellum": [_GPT2],
    "roberta-bpe": [_GPT2],
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "exaone": _DIGITS_THEN_GPT2,
    "minerva-7b": _DIGITS_THEN_GPT2,
    "falcon": [_PUNCTUATION_AND_TICK, _GPT2, r"[0-9][0-9][0-9]"],
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "hunyuan": _QWEN2,
    "grok-2": _QWEN2,
    "qwen35": [_cl100k(r"\p{N}", letters=r"\p{L}\p{M}")],
    "seed-coder": [
        rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        rf"|\s*[\r\n]+|{_TRAILING_SPACE}"
    ],
    "tekken": [_o200k(r"\p{N}", "")],
    "gpt-4o": [_o200k(r"\p{N}{1,3}", f"{_CONTRACTION_ANY_CASE}?")],
    "llama4": [_o200k(r"\p{N}{1,3}", f"{_CONTRACTION_ANY_CASE}?")],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_DEEPSEEK, r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_V3],
    "hunyuan-dense": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_V3],
}

_IGNORES_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"})
_WRITES_BOS = _IGNORES_MERGES


def families() -> tuple[str, ...]:
    """Names that `byte_level` knows, in alphabetical order."""
    return tuple(sorted(_FAMILIES))


def ignores_merges(name: str) -> bool:
    """Whether a word that is a token as a whole is taken as that token, whatever the merges say."""
    return name in _IGNORES_MERGES


def writes_bos(name: str) -> bool:
    """Whether the family begins a prompt with BOS when the file does not say."""
    return name in _WRITES_BOS


def byte_level(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of family `name`: its expressions in order, then bytes written as the 256 printable characters.

    Raises:
        ModelError: the name is not known. There is no fallback: a wrong split gives ids that look right and answer
        badly.
    """
    expressions = _FAMILIES.get(name)
    if expressions is None:
        raise ModelError(
            f"`tokenizer.ggml.pre` is {name!r}, which is not known",
            param="tokenizer.ggml.pre",
            hint=f"known: {', '.join(families())}",
        )
    cuts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions
    ]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
