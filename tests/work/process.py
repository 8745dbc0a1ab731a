"""A worker in a process: `python process.py STORE LEASE_S`. Ends on SIGTERM, and prints how much it has done."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agentloop.store.store import Store
from agentloop.work.worker import Worker, card_of_process
from work.doers import Timed


async def main(where: str, lease_s: float) -> None:
    store = Store(where if "://" in where else Path(where))
    worker = Worker(store, card_of_process(("rollout",), n_slots=4, lease_s=lease_s), {"rollout": Timed()})
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    print("up", flush=True)
    await worker.run()
    store.close()
    print(json.dumps({"done": worker.n_done}))


logging.basicConfig()
asyncio.run(main(sys.argv[1], float(sys.argv[2])))
