"""The target slice of `step.py` through transformers (`MiniMaxM3VLForCausalLM`, bf16, random weights), as a peer.

    python tests/benchmarks/step_transformers.py [--layers 6] [--batch 1 8] [--context 4096] [--tokens 8] [--json FILE]

Needs torch and transformers 5.24 or newer and imports nothing of this library. A verify step is one forward of 8 tokens
a row behind a cache of `context` tokens. "kernels" is the sum of the CUDA kernel durations of one forward, "wall" the
time from call to call, medians.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

CONFIG = Path(__file__).parent.parent / "data" / "inventory" / "configs" / "m31-flash.config.json"


def make_model(layers: int, tiny: bool, device: str) -> MiniMaxM3VLForCausalLM:
    text = json.loads(CONFIG.read_text())["text_config"]
    text["num_hidden_layers"] = layers
    text["moe_layer_freq"] = [int(i > 0) for i in range(layers)]
    sparse = text["sparse_attention_config"]
    for name in ("sparse_attention_freq", "sparse_disable_index_value"):
        sparse[name] = sparse[name][:layers]
    text.pop("architectures"), text.pop("dtype")
    if tiny:
        text |= dict(vocab_size=512, hidden_size=256, num_attention_heads=8, head_dim=32, rotary_dim=16)
        text |= dict(num_local_experts=8, dense_intermediate_size=256, intermediate_size=128)
        text |= dict(shared_intermediate_size=128, bos_token_id=None, eos_token_id=None)
        sparse["sparse_index_dim"] = 32
    config = MiniMaxM3VLTextConfig(**text)
    torch.set_default_dtype(torch.bfloat16)  # made in float32 first, the slice would not fit the device
    with torch.device(device), transformers.initialization.no_init_weights():
        model = MiniMaxM3VLForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.eval()


@torch.inference_mode()
def time_step(
    model: MiniMaxM3VLForCausalLM, batch: int, context: int, tokens: int, repeats: int
) -> tuple[float, float]:
    """-> microseconds of kernels (0 on a CPU) and from call to call, medians over forwards behind one cache."""
    device = next(model.parameters()).device
    vocab = model.config.vocab_size
    cache = DynamicCache(config=model.config)
    for start in range(0, context, 1024):
        part = torch.randint(vocab, (batch, min(1024, context - start)), device=device)
        model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=1)
    assert cache.get_seq_length() == context
    block = torch.randint(vocab, (batch, tokens), device=device)

    def forward() -> None:  # the cache grows by a block a call, by a few hundred tokens in all
        model(input_ids=block, cache=cache, use_cache=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        forward()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        forward()
        times.append(time.perf_counter() - begin)
    kernels = 0.0
    if device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                forward()
        kernels = sum(e.self_device_time_total for e in profile.key_averages()) / 3
    return kernels, 1e6 * sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no row is begun")
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a CPU")
    options, start, rows = parser.parse_args(), time.perf_counter(), []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(options.layers, options.tiny, device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {options.layers} layers, "
        f"{size / 1e9:.2f} GB, experts by {model.config._experts_implementation}, attention by "
        f"{model.config._attn_implementation}, made after {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    for context in options.context:
        for batch in options.batch:
            if time.perf_counter() - start > options.time_limit:
                print(f"stopped by the time limit of {options.time_limit:.0f} s")
                return
            kernels, wall = time_step(model, batch, context, options.tokens, options.repeats)
            print(
                f"batch {batch}, context {context}, {options.tokens} tokens a row: kernels {kernels:.1f} us, "
                f"wall {wall:.1f} us",
                flush=True,
            )
            rows.append(dict(batch=batch, context=context, tokens=options.tokens, us=kernels, wall=wall))
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
