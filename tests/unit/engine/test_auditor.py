from __future__ import annotations

import logging

import pytest

from firstlight.engine.auditor import Auditor
from tests.unit.scheduler.drive import VOCAB, Drive, ids_alone, request

PROMPT = [(3 * i) % VOCAB for i in range(33)]


def ask(drive: Drive, name: str) -> int:
    wanted = request(name, PROMPT, 3)
    drive.add(wanted)
    drive.finish()
    assert drive.ids(name) == ids_alone(wanted, 64)
    return drive.reports[name].hit_tokens


def auditor(drive: Drive, share: float = 0.01) -> Auditor:
    return Auditor(drive.backend, drive.cache, share, 3, drive.clock)


def test_audit_of_sound_blocks_finds_nothing_and_leaves_the_cache_as_it_was() -> None:
    drive = Drive(num_blocks=24)
    ask(drive, "first")
    audit = auditor(drive)
    assert audit.wait_s(drive.clock()) is None, "nothing was hit yet"
    for i in range(20):
        assert ask(drive, f"r{i}") == 32
        audit.audit()
        drive.scheduler.check()
    stats = drive.cache.stats()
    assert (stats.audits, stats.audit_mismatches) == (20, 0)
    assert audit.wait_s(drive.clock()) is None


def test_audit_of_a_corrupted_block_drops_it_and_what_stands_on_it_and_says_where_it_came_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drive = Drive(num_blocks=24)
    ask(drive, "first")
    ask(drive, "second")
    chain, _ = drive.cache.audits.take()
    blocks = drive.cache.sampled(chain, 7)
    assert blocks is not None
    data = bytearray(drive.backend.read_blocks([blocks[4]]))
    data[8] ^= 1
    drive.backend.write_blocks([blocks[4]], bytes(data))
    drive.cache.audits._samples.append((chain, 4))
    with caplog.at_level(logging.ERROR):
        auditor(drive).audit()
    stats = drive.cache.stats()
    assert (stats.audits, stats.audit_mismatches) == (1, 1)
    assert stats.evictions_by_reason["audit"] > 0
    assert "cache_audit_mismatch" in caplog.text
    assert "origin='first'" in caplog.text
    drive.scheduler.check()
    assert ask(drive, "third") == 16


def test_audit_drops_a_wrong_block_from_the_tiers_too() -> None:
    drive = Drive(num_blocks=20, host_blocks=100, max_step_tokens=32)
    ask(drive, "first")
    for i in range(5):
        drive.add(request(f"x{i}", [(5 * i + 11 * j) % VOCAB for j in range(40)], 6))
    drive.finish()
    ask(drive, "second")
    chain, _ = drive.cache.audits.take()
    blocks = drive.cache.sampled(chain, 2)
    assert blocks is not None
    assert drive.cache.origin(blocks[2]) == "host"
    drive.backend.write_blocks([blocks[2]], bytes(drive.backend.info.kv_bytes_per_block))
    drive.cache.audits._samples.append((chain, 2))
    auditor(drive).audit()
    assert drive.cache.stats().audit_mismatches == 1
    assert ask(drive, "third") == 8
    drive.cache.close()


def test_audit_takes_only_its_share_of_the_time_and_waits_for_quiet() -> None:
    drive = Drive(num_blocks=24)
    ask(drive, "first")
    ask(drive, "second")
    ask(drive, "third")
    audit = auditor(drive, share=0.1)
    idle_since = drive.clock()
    assert audit.wait_s(idle_since) == pytest.approx(1.0)
    drive.clock.advance(5.0)
    assert audit.wait_s(idle_since) == 0.0
    assert auditor(drive, share=0.0).wait_s(idle_since) is None


def test_audit_of_blocks_that_are_gone_is_none() -> None:
    drive = Drive(num_blocks=10)
    ask(drive, "first")
    ask(drive, "second")
    drive.add(request("large", [9] * 36, 3))
    drive.finish()
    auditor(drive).audit()
    assert drive.cache.stats().audits == 0
