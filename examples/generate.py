"""Generate text with transformers' ``generate``, distributed over all processes.

torchrun --standalone --nproc-per-node 2 examples/generate.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.integrations import WithCache, generate

SEQUENCES, LENGTH = 2, 32


def main() -> None:
    """Continue two prompts: first with greedy decoding, then with sampling."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=128, eos_token_id=None)).eval()
    prompts = torch.randint(256, (SEQUENCES, 8))

    # The cache has a fixed length, for the prompt and the generated tokens. The module's arguments are the tokens, their
    # first position in the cache, and a mask of the positions that hold tokens.
    cached = WithCache(model, SEQUENCES, LENGTH).eval()
    example = (prompts, torch.tensor(0), torch.ones(SEQUENCES, LENGTH, dtype=torch.int64))
    parallel = autotp.parallelize(cached, args=example, mode="inference")

    best = generate(parallel, model, prompts, max_new_tokens=16, do_sample=False)
    torch.manual_seed(1)  # so that every rank samples the same tokens
    sampled = generate(parallel, model, prompts, max_new_tokens=16, do_sample=True, top_k=50)
    if dist.get_rank() == 0:
        for name, tokens in (("greedy", best), ("sampled", sampled)):
            for sequence in tokens.tolist():
                print(f"{name}: {sequence[:8]} -> {sequence[8:]}")
        print("as on one device:", torch.equal(best, model.generate(prompts, max_new_tokens=16, do_sample=False)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
