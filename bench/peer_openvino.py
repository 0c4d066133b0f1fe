"""Runs jobs in-process on OpenVINO GenAI with prefix caching. Needs only that environment's own packages.

usage: peer_openvino.py MODEL_F16.gguf JOBS.json   (prints one line of JSON for each job)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


def main(model: str, jobs_file: str) -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 8192
    pipe = genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_PRECISION_HINT="bf16")
    for job in json.loads(Path(jobs_file).read_text(encoding="utf-8")):
        print(json.dumps(run(pipe, job["prompts"], job["max_tokens"])), flush=True)


def run(pipe: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    ids = np.array(prompts, dtype=np.int64)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    started = time.perf_counter()
    metrics = pipe.generate(inputs, config).perf_metrics
    wall_ms = (time.perf_counter() - started) * 1e3
    return {"ttft_ms": metrics.get_ttft().mean, "itl_ms": metrics.get_tpot().mean, "wall_ms": wall_ms}


if __name__ == "__main__":
    main(*sys.argv[1:])
