"""Blocks that went down and came back: the same answers, bounded tiers, and everything unsound is a miss."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from firstlight.cache.tiers import BlockRecord, CorruptBlockError, DiskTier, ForeignBlockError
from firstlight.errors import ConfigError
from tests.unit.scheduler.drive import SPACE, VOCAB, Drive, ids_alone, request

PROMPT = [(3 * i) % VOCAB for i in range(33)]


def record(at: int = 0, num_bytes: int = 1000) -> BlockRecord:
    made = BlockRecord(bytes([at]) * 32, bytes(32), b"tokens", bytes([at]) * num_bytes)
    made.seal(SPACE)
    return made


def drive(**options: object) -> Drive:
    return Drive(**{"num_blocks": 20, "max_step_tokens": 32, "token_s": 0.001} | options)  # type: ignore[arg-type]


def others(one: Drive, name: str) -> None:
    """Requests that together use every block of the pool several times."""
    for i in range(5):
        one.add(request(f"{name}{i}", [(5 * i + 11 * j + len(name)) % VOCAB for j in range(40)], 6))
    one.finish()


def again(one: Drive, name: str) -> int:
    """Asks PROMPT again; how many of its tokens were brought back from a tier. Its answer must be the same."""
    wanted = request(name, PROMPT, 5)
    one.add(wanted)
    one.finish()
    assert one.ids(name) == ids_alone(wanted, 64)
    return one.reports[name].loaded_tokens


def test_evicted_prefix_comes_back_from_host_memory() -> None:
    one = drive(host_blocks=100)
    assert again(one, "first") == 0
    others(one, "x")
    assert again(one, "second") == 32
    assert one.reports["second"].hit_tokens == 32
    assert one.cache.stats().tiers["host"].loaded == 8
    one.cache.close()


def test_host_memory_keeps_what_was_used_last_and_no_more_than_its_bound() -> None:
    one = drive(host_blocks=6)
    again(one, "first")
    others(one, "x")
    assert one.cache.stats().host_blocks <= 6
    assert again(one, "second") == 0
    one.cache.close()


def test_block_goes_through_host_memory_to_disk_and_back(tmp_path: Path) -> None:
    one = drive(host_blocks=6, disk=tmp_path)
    again(one, "first")
    others(one, "x")
    assert again(one, "second") == 32
    counts = one.cache.stats().tiers
    assert counts["disk"].loaded + counts["host"].loaded == 8
    one.cache.close()


def test_cached_blocks_survive_a_restart_on_disk(tmp_path: Path) -> None:
    first = drive(disk=tmp_path)
    again(first, "first")
    first.cache.close()
    second = drive(disk=tmp_path)
    assert again(second, "second") == 32
    assert second.cache.stats().tiers["disk"].loaded == 8
    second.cache.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_damaged_files_are_misses_counted_and_removed(tmp_path: Path, damage: str) -> None:
    first = drive(disk=tmp_path)
    again(first, "first")
    first.cache.close()
    files = sorted(tmp_path.glob("*/*.kv"))
    contents = [path.read_bytes() for path in files]
    for i, (path, raw) in enumerate(zip(files, contents, strict=True)):
        if damage == "flip":
            path.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
        elif damage == "swap":
            path.write_bytes(contents[i - 1])
        else:
            path.write_bytes(raw[: len(raw) // 2 if damage == "cut" else 0])
    second = drive(disk=tmp_path)
    assert again(second, "second") == 0
    counts = second.cache.stats().tiers["disk"]
    assert (counts.corrupt, counts.foreign) == ((0, 1) if damage == "swap" else (1, 0))
    second.cache.close()


def test_corrupt_block_in_host_memory_is_a_miss_and_what_stands_before_it_is_used() -> None:
    one = drive(host_blocks=100)
    again(one, "first")
    others(one, "x")
    assert one.cache.tiering is not None
    table = one.cache.table("probe", b"")
    one.cache.peek(table, PROMPT)
    assert table.chain is not None
    hosted = one.cache.tiering.tiers.hosted(table.chain.keys[5])
    assert hosted is not None
    while not hosted.is_intact(SPACE):  # the other thread may not have sealed it yet
        time.sleep(1e-3)
    assert hosted.payload is not None
    hosted.payload = hosted.payload[:-1] + b"\x7f"
    assert again(one, "second") == 20
    assert one.cache.stats().tiers["host"].corrupt == 1
    one.cache.close()


def test_load_slower_than_computing_is_not_begun() -> None:
    one = drive(host_blocks=100)
    again(one, "first")
    others(one, "x")
    assert one.cache.tiering is not None
    one.cache.tiering.tiers._block_s["host"] = 3600.0
    assert again(one, "second") == 0
    assert one.cache.stats().tiers["host"].loaded == 0
    one.cache.close()


def test_requests_with_the_same_lost_prefix_load_it_once() -> None:
    one = drive(host_blocks=100, num_blocks=24)
    again(one, "first")
    others(one, "x")
    wanted = [request(f"r{i}", [*PROMPT[:32], 7, i], 4) for i in range(3)]
    one.add(*wanted)
    one.finish()
    assert one.cache.stats().tiers["host"].loaded == 8
    for each in wanted:
        assert one.ids(each.request_id) == ids_alone(each, 64)
    one.cache.close()


def test_abort_while_its_prefix_is_loaded_leaks_nothing() -> None:
    one = drive(host_blocks=100)
    again(one, "first")
    others(one, "x")
    one.add(request("gone", PROMPT, 5))
    one.scheduler.plan()
    assert one.scheduler.is_loading
    one.abort("gone")
    others(one, "y")
    assert one.cache.num_moving == 0
    assert one.cache.num_free == one.num_blocks
    one.cache.close()


def test_reserve_is_kept_from_the_watermark_on_and_no_step_copies() -> None:
    one = drive(host_blocks=100, num_blocks=40, reserve=8)
    again(one, "first")
    for i in range(30):
        one.add(request(f"r{i}", random.Random(i).choices(range(VOCAB), k=12), 3))
        one.finish()
        give_up_s = time.monotonic() + 10
        while one.cache.num_moving and time.monotonic() < give_up_s:
            time.sleep(1e-4)
            one.cache.spill_ahead()
    assert one.cache.pool.num_evictions == 0, "a step found no block without a key"
    assert one.cache.stats().host_blocks > 20
    assert one.cache.stats().evictions_by_reason["ahead"] > 20
    assert one.cache.stats().hit_tokens_by_tier["host"] == 0
    assert again(one, "second") > 0
    assert one.cache.stats().hit_tokens_by_tier["host"] > 0
    one.cache.close()


def test_preempted_request_comes_back_from_host_memory_and_computes_little_again() -> None:
    recomputed = []
    for host_blocks in (0, 100):
        one = drive(num_blocks=12, max_step_rows=3, reserve_output=False, host_blocks=host_blocks)
        wanted = [request(f"r{i}", [(7 * i + j) % VOCAB for j in range(12)], 30) for i in range(3)]
        one.add(*wanted)
        one.finish()
        assert one.scheduler.stats.preemptions > 0
        for each in wanted:
            assert one.ids(each.request_id) == ids_alone(each, 48)
        recomputed.append(one.scheduler.stats.recomputed_tokens / one.scheduler.stats.preemptions)
        one.cache.close()
    assert recomputed[1] <= one.block_size, "more than the block that was not full"
    assert recomputed[1] < recomputed[0]


def test_disk_keeps_within_its_bound_the_least_recently_used_go_first(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, SPACE, 5000)
    for at in range(4):
        assert disk.write(record(at))
    assert not disk.write(record(3)), "it is there already"
    disk.read(record(0).key)
    disk.write(record(4))
    assert record(0).key in disk
    assert record(1).key not in disk
    assert disk.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 5000
    assert not disk.write(record(9, 6000)), "larger than the bound"


def test_disk_of_other_weights_is_foreign_and_goes_first(tmp_path: Path) -> None:
    other = DiskTier(tmp_path, b"o" * 32, 10_000)
    other.write(record(0))
    ours = DiskTier(tmp_path, SPACE, 3000)
    assert record(0).key not in ours
    assert len(ours) == 1
    ours.write(record(1))
    ours.write(record(2))
    assert record(1).key in ours
    assert not list(tmp_path.glob(f"{(b'o' * 8).hex()}/*.kv"))
    path = next(tmp_path.glob(f"{SPACE.hex()[:16]}/{record(1).key.hex()}.kv"))
    foreign = DiskTier(tmp_path / "foreign", b"o" * 32, 10_000)
    sealed = record(1)
    sealed.seal(b"o" * 32)
    foreign.write(sealed)
    path.write_bytes(next((tmp_path / "foreign").glob("*/*.kv")).read_bytes())
    with pytest.raises(ForeignBlockError):
        ours.read(record(1).key)
    assert not path.exists()


def test_disk_crash_while_writing_leaves_nothing_that_is_found(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, SPACE, 10_000)
    disk.write(record(0))
    torn = tmp_path / SPACE.hex()[:16] / "123-4.tmp"
    torn.write_bytes(b"half a block")
    os.utime(torn, (0, 0))
    restarted = DiskTier(tmp_path, SPACE, 10_000)
    assert len(restarted) == 1
    assert not torn.exists()
    assert restarted.read(record(0).key).payload == record(0).payload


def test_disk_file_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, SPACE, 10_000)
    disk.write(record(0))
    next(tmp_path.glob("*/*.kv")).unlink()
    with pytest.raises(FileNotFoundError):
        disk.read(record(0).key)
    assert record(0).key not in disk
    assert disk.num_bytes == 0


def test_disk_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, SPACE, 10_000)
    disk.write(record(0, 8))
    path = next(tmp_path.glob("*/*.kv"))
    raw = path.read_bytes()
    for at in range(len(raw)):
        disk.write(record(0, 8))
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        with pytest.raises((CorruptBlockError, ForeignBlockError)):
            disk.read(record(0).key)


def test_disk_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="disk_cache"):
        DiskTier(file / "below", SPACE, 1000)
