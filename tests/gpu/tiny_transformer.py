# SPDX-License-Identifier: Apache-2.0
"""A small transformer with a paged cache on the device and a CUDA graph for one decoded token, as engines have them."""

import torch

LAYERS, HEADS, DIM, BLOCK = 4, 4, 64, 16
WIDTH = HEADS * DIM
VOCABULARY = 512


class TinyTransformer:
    """Keys and values of token *t* lie in block ``table[t // BLOCK]``."""

    def __init__(self, blocks: int, table_blocks: int) -> None:
        made = torch.Generator(device="cuda").manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made, device="cuda") / shape[0] ** 0.5

        self.embedding = weight(VOCABULARY, WIDTH) * 16
        self.layers = [{name: weight(WIDTH, WIDTH) for name in "qkvo"} for _ in range(LAYERS)]
        self.caches = {f"layers.{n}": torch.zeros(2, blocks, BLOCK, HEADS, DIM, device="cuda") for n in range(LAYERS)}
        self.token = torch.zeros(1, dtype=torch.long, device="cuda")
        self.length = torch.zeros(1, dtype=torch.long, device="cuda")
        self.table = torch.zeros(table_blocks, dtype=torch.long, device="cuda")
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.zeros(VOCABULARY, device="cuda")

    def prefill(self, tokens: torch.Tensor, table: torch.Tensor) -> None:
        """Compute all tokens; their keys and values go to the blocks of *table*."""
        count = len(tokens)
        where = torch.arange(count, device="cuda")
        blocks, places = table[where // BLOCK], where % BLOCK
        x = self.embedding[tokens]
        for layer, cache in zip(self.layers, self.caches.values(), strict=True):
            q, k, v = ((x @ layer[name]).view(count, HEADS, DIM) for name in "qkv")
            cache[0][blocks, places] = k
            cache[1][blocks, places] = v
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
            )
            x = x + out.transpose(0, 1).reshape(count, WIDTH) @ layer["o"]

    def capture(self) -> None:
        """Record the graph of one decoded token."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._decode()

    def decode(self, token: int, length: int, table: torch.Tensor) -> torch.Tensor:
        """Logits after one more token behind *length* tokens, by the graph."""
        self.token.fill_(token)
        self.length.fill_(length)
        self.table.copy_(table)
        assert self.graph is not None
        self.graph.replay()
        return self.logits.clone()

    def _decode(self) -> None:
        x = self.embedding[self.token]
        block, place = self.table[self.length // BLOCK], self.length % BLOCK
        there = torch.arange(len(self.table) * BLOCK, device="cuda") <= self.length
        for layer, cache in zip(self.layers, self.caches.values(), strict=True):
            q, k, v = ((x @ layer[name]).view(1, HEADS, DIM) for name in "qkv")
            cache[0][block, place] = k
            cache[1][block, place] = v
            keys, values = (cache[n][self.table].view(-1, HEADS, DIM) for n in (0, 1))
            scores = torch.einsum("ohd,thd->ht", q, keys) / DIM**0.5
            scores = scores.masked_fill(~there, float("-inf"))
            x = x + torch.einsum("ht,thd->hd", scores.softmax(-1), values).view(1, WIDTH) @ layer["o"]
        self.logits.copy_((x @ self.embedding.T)[0])
