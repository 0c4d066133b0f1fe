"""Asks a running server (`make serve`) about one long document; from the second question on it is in the cache."""

from pathlib import Path

from prefixcache.client import Client

handbook = Path(__file__).with_name("handbook.md").read_text(encoding="utf-8")

with Client("127.0.0.1:50051") as client:
    for question in ("On which port does the server listen for gRPC?", "How long is the grace period?"):
        print(f"> {question}")
        messages = [{"role": "system", "content": handbook}, {"role": "user", "content": question}]
        for delta in client.generate(messages=messages, max_tokens=60, temperature=0.0):
            print(delta.text, end="", flush=True)
        print(f"\n  {delta.usage.cached_tokens} of {delta.usage.prompt_tokens} prompt tokens were cached,")
        print(f"  first token after {delta.timings.ttft_ms:.0f} ms\n")
