"""What is compared with: vLLM 0.26.0 with weights of the same shapes on one H200, and llama-8b's matrix products alone, by number of sequences.

Random prompts of 512 tokens, greedy, 129 tokens whatever they are, prefix cache off, batch = concurrency, best of three after warming up.
Tokens a second = sequences x 128 / (time of 129 tokens - time of 1 token), the slowest sequence included.
"""

NUM_PROMPT_TOKENS = 512
NUM_STEPS = 128
"""Decode steps behind the first token."""
PLAIN_TOK_S = {
    "llama-8b": {1: 202, 8: 1563, 32: 5440, 128: 14885, 256: 18956},
    "smollm2-135m": {1: 622, 8: 4755, 32: 15581, 128: 32392, 256: 50487},
}
DRAFT_TOK_S = {1: 208, 8: 1585, 32: 4252, 128: 7976, 256: 11857}
"""llama-8b with the draft model llama-1b, K = 5, drafts accepted at `SYNTHETIC_RATES`."""
EAGLE3_TOK_S = {1: 487, 8: 3185, 32: 10345, 128: 18709, 256: 20309}
"""llama-8b with an EAGLE-3 head (one layer of its shape, 32,000 ids), K = 3, the same rates."""
SYNTHETIC_RATES = (0.8, 0.64, 0.512, 0.41, 0.328)
"""Probability that the first i drafts are all accepted."""
PREFILL_S = {1: 0.017, 8: 0.100, 32: 0.364, 128: 1.46, 256: 2.96}
"""llama-8b."""
GEMM_MS = {1: 3.97, 8: 4.01, 32: 4.16, 128: 4.63, 256: 6.03}
"""Linear layers and head of llama-8b alone, through cuBLAS in one graph."""
