"""Chat with a model that vLLM serves; answers appear while they are written.

    vllm serve TARGET --spec-model DRAFTER --spec-tokens 12
    python examples/chat_client.py --address http://localhost:8000

Reads your messages from the terminal, one a line, until the end of the input (Ctrl-D), and prints
an answer to each. Nothing in here knows of the drafter: a server with one is used as any other.
"""

from __future__ import annotations

import argparse
import sys

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="http://localhost:8000")
    parser.add_argument("--model", help="name of the served model; by default the first one")
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.address}/v1", api_key="none")
    model = args.model or client.models.list().data[0].id
    messages = []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        chunks = client.chat.completions.create(
            model=model, messages=messages, max_tokens=args.max_tokens, stream=True
        )
        answer = ""
        for chunk in chunks:
            piece = chunk.choices[0].delta.content or ""
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
