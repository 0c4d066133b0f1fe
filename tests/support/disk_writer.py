"""Numbered keys and values, and a process that writes, reads and deletes them on disk until it is killed."""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
from pathlib import Path

from prefixcache.store.disk import DiskStore

NUM_KEYS = 300
MAX_BYTES = 2**24
SIZES = (3_000, 60_000, 370_000)


def key(number: int) -> bytes:
    return hashlib.md5(str(number).encode()).digest()


def value(number: int, num_bytes: int = 100_000) -> bytes:
    return random.Random(number).randbytes(num_bytes)


async def write_until_killed(folder: Path, seed: str) -> None:
    store = DiskStore(folder, MAX_BYTES)
    chance = random.Random(seed)
    print("started", flush=True)
    while True:
        numbers = chance.sample(range(NUM_KEYS), 8)
        await store.write([(key(number), value(number, chance.choice(SIZES))) for number in numbers])
        await store.read([key(number) for number in chance.sample(range(NUM_KEYS), 8)])
        if chance.random() < 0.2:
            await store.delete([key(chance.randrange(NUM_KEYS))])


if __name__ == "__main__":
    asyncio.run(write_until_killed(Path(sys.argv[1]), sys.argv[2]))
