"""The whole stack with a real (tiny, random) model behind the HTTP API."""

from pathlib import Path
from typing import Any

from specwire.config import HttpConfig
from tests.engine.tiny_models import save_tiny_model
from tests.http.serving import front
from tests.integration.tiny import drafter_config, tiny_stack, verifier_config


async def test_text_logprobs_and_usage(tmp_path: Path, socket_dir: Path) -> None:
    folder = tmp_path / "tiny"
    save_tiny_model(folder)
    async with tiny_stack(socket_dir, verifier_config(folder), drafter_config(folder), max_num_seqs=4) as stack:
        config = HttpConfig(listen=("127.0.0.1:0",), coordinator=stack.coordinator.address)
        async with front(config) as http:
            model = (await http.openai.models.list()).data[0].id
            prompt = "漢字 👩‍👩‍👧‍👦 abc"
            for temperature in (0.0, 1.0):
                result = await stack.client.generate(prompt, max_tokens=40, temperature=temperature, seed=3, logprobs=2)
                sent: dict[str, Any] = {"prompt": prompt, "max_tokens": 40, "temperature": temperature, "seed": 3, "logprobs": 2}
                whole = (await http.post("/v1/completions", sent | {"return_token_ids": True, "model": model})).json
                (choice,) = whole["choices"]
                assert choice["token_ids"] == result.token_ids
                assert choice["text"] == result.text
                assert result.choices[0].logprobs is not None
                assert choice["logprobs"]["token_logprobs"] == [entry.sampled for entry in result.choices[0].logprobs]
                assert whole["usage"]["prompt_tokens"] == len(prompt.encode())
                assert whole["usage"]["completion_tokens"] == len(result.token_ids) == len(choice["logprobs"]["tokens"])
                events = (await http.post("/v1/completions", sent | {"stream": True})).events
                assert "".join(event["choices"][0]["text"] for event in events) == result.text
            # Without drafts, and within a batch: the same.
            plain = (await http.post("/v1/completions", {"prompt": [prompt] * 3, "max_tokens": 40, "seed": 3, "max_draft_tokens": 0})).json
            assert {choice["text"] for choice in plain["choices"]} == {result.text}
            cut = (await http.post("/v1/completions", sent | {"bad_words": [result.text[5]], "logit_bias": {str(result.token_ids[0]): -100}})).json
            assert cut["choices"][0]["logprobs"]["tokens"][0] != choice["logprobs"]["tokens"][0]
