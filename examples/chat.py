"""A conversation in the terminal: Ctrl-C ends an answer, Ctrl-D the program."""

import argparse

from specwire import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", default="You are a helpful assistant.")
    parser.add_argument("--address", default="127.0.0.1:50050", help="the coordinator: host:port or unix:path")
    arguments = parser.parse_args()

    messages = [{"role": "system", "content": arguments.system}]
    with Client(arguments.address) as client:
        while True:
            try:
                messages.append({"role": "user", "content": input("> ")})
            except EOFError:
                return
            answer = ""
            try:
                with client.chat_stream(messages, max_tokens=256, temperature=0.7) as stream:
                    for event in stream:
                        answer += event.text
                        print(event.text, end="", flush=True)
            except KeyboardInterrupt:
                pass  # what was said so far stays in the conversation
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
