"""Text forced through the default model comes back as it was, however its tokens are cut into pieces."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight import Engine, SamplingParams
from firstlight.models.gguf import GGUFFile
from firstlight.text import TextPipeline, Tokenizer

TEXTS = [
    "naïve café, façade; Œuvre",
    "日本語のテキストと中文字符、한국어 문장",
    "ภาษาไทยไม่มีช่องว่าง தமிழ் বাংলা తెలుగు",
    "العربية من اليمين إلى اليسار \u202eabc\u202c",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤦🏽‍♂️ e\u0301 \u200b\ufeff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9d1\U0010fffd \x00\x01\x7f\r\n\t",
    "\ufffd is a real replacement character \ufffd\ufffd",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    with GGUFFile(smollm2_path) as file:
        return Tokenizer.from_gguf(file.metadata)


def shared_texts(folder: Path, name: str) -> Iterator[str]:
    path = folder / "workloads" / "prompts" / name
    raw = path.read_bytes()
    for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines():
        yield from json.loads(line)["turns"]


def joined(tokenizer: Tokenizer, ids: list[int], *cuts: int) -> str:
    """The text of all pushes, the ids cut at the given places, and of the end."""
    pipeline, text, start = TextPipeline(tokenizer, is_continuation=True), "", 0
    for cut in [*cuts, len(ids)]:
        text += pipeline.push(ids[start:cut]).text
        start = cut
    return text + pipeline.finish().text


def test_forced_tokens_stream_as_the_text_they_spell(smollm2_path: Path, tokenizer: Tokenizer) -> None:
    with Engine(str(smollm2_path), max_model_len=512) as engine:
        for text in TEXTS:
            ids = tokenizer.encode(text)
            params = SamplingParams(max_tokens=len(ids), temperature=0, ignore_eos=True)
            pieces = [delta.text for delta in engine.stream("Say it:", params, forced_ids=ids)]
            (whole,) = engine.generate("Say it:", params, forced_ids=ids)
            assert whole.token_ids == ids
            assert "".join(pieces) == whole.text == text


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_joins_to_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert joined(tokenizer, ids, *range(len(ids))) == text
    for cut in range(len(ids) + 1):
        assert joined(tokenizer, ids, cut) == text


def test_every_split_of_the_utf8_workload_joins_to_the_whole(shared_dir: Path, tokenizer: Tokenizer) -> None:
    for text in shared_texts(shared_dir, "utf8.jsonl"):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, is_continuation=True)
        assert whole == text
        assert joined(tokenizer, ids, *range(len(ids))) == whole
        for cut in range(len(ids) + 1):
            assert joined(tokenizer, ids, cut) == whole


def test_random_splits_of_the_multilingual_workload_join_to_the_whole(shared_dir: Path, tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for text in shared_texts(shared_dir, "multilingual.jsonl.gz"):
        ids = tokenizer.encode(text)
        assert joined(tokenizer, ids, *range(len(ids))) == text
        assert joined(tokenizer, ids, *sorted(rng.choices(range(len(ids) + 1), k=5))) == text
