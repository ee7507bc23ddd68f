"""Newton-Schulz by itself: forms of it, their errors, and on a GPU their times.

    python -m benchmarks.newton_schulz                  # matrices of 1600 rows; on a GPU also times
    python -m benchmarks.newton_schulz --side 256       # on a CPU, in seconds

"plain" multiplies the matrix in every iteration, as torch.optim.Muon does. The Gram form iterates on the Gram matrix of
X alone, since all factors are polynomials of it and commute, and multiplies X once in the end, or also after two
iterations ("restart"): of 5 iterations on m x 4m it takes 25 or 30 m³ multiplications instead of 45. Errors are to the
same iteration in fp64, in the Frobenius norm, for matrices with spectra that make it hard.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import at_least
from onefold.optim.newton_schulz import COEFFICIENTS, EPS, Muon, orthogonal
from onefold.optim.update_lanes import LANES, Lanes

A, B, C = COEFFICIENTS
STEPS = 5
SETTINGS = {"ns_coefficients": COEFFICIENTS, "ns_dtype": "bf16", "ns_steps": STEPS, "eps": EPS}
OWNED = {(4, 1): 6, (1, 4): 6, (3, 1): 6, (1, 1): 6}  # matrices of one rank of eight, GPT of 48 layers, in sides


def plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = (x / x.norm()).to(dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def gram_form(x: Tensor, dtype: torch.dtype, restart: int | None) -> Tensor:
    """With a restart, the matrix is also multiplied after so many iterations."""
    x = (x / x.norm()).to(dtype)
    for steps in (restart, STEPS - restart) if restart else (STEPS,):
        gram, product = x @ x.mT, None
        for step in range(steps):
            factor = torch.addmm(gram, gram, gram, beta=B, alpha=C)  # and A times the identity
            if product is None:
                product = factor.clone()
                product.diagonal().add_(A)
            else:
                product = torch.addmm(product, factor, product, beta=A)
            if step < steps - 1:
                half = torch.addmm(gram, factor, gram, beta=A)
                gram = torch.addmm(half, half, factor, beta=A)
        assert product is not None
        x = product @ x
    return x


def forms() -> dict[str, Callable[[Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found[f"plain {name}"] = lambda x, dtype=dtype: plain(x, dtype)
        for restart in (None, 2):
            called = f"Gram {name}{', restart' if restart else ''}"
            found[called] = lambda x, dtype=dtype, restart=restart: gram_form(x, dtype, restart)
    return found


def hard(side: int, ratio: int, device: torch.device) -> dict[str, Tensor]:
    """Matrices of side x ratio · side in fp64, by the name of their spectrum."""
    torch.manual_seed(0)
    like = {"device": device, "dtype": torch.float64}
    noise = torch.randn(side, ratio * side, **like)
    left = torch.linalg.qr(torch.randn(side, side, **like))[0]
    right = torch.linalg.qr(torch.randn(ratio * side, side, **like))[0]
    few = torch.zeros(side, **like)
    few[:16] = 1
    spectra = {f"condition 1e{power}": torch.logspace(0, -power, side, **like) for power in (2, 4, 6)}
    made = {name: (left * spectrum) @ right.mT for name, spectrum in spectra.items()}
    return {
        "Gaussian": noise,
        **made,
        "rank 16 and noise": (left * few) @ right.mT + 1e-3 / noise.norm(dim=1).mean() * noise,
    }


def show_errors(side: int, device: torch.device) -> None:
    names = forms()
    print(f"{'error, relative':34s}" + "".join(f"{name:>20s}" for name in names))
    for ratio in (1, 4):
        for name, matrix in hard(side, ratio, device).items():
            exact = plain(matrix, torch.float64)
            errors = [(form(matrix.float()).double() - exact).norm() / exact.norm() for form in names.values()]
            print(f"{side} x {ratio * side}, {name:22s}" + "".join(f"{error:20.4f}" for error in errors), flush=True)


def milliseconds(run: Callable[[], object]) -> float:
    """On the device, with the host ahead of it."""
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended))
    return statistics.median(found[2:])


def show_times(side: int, device: torch.device) -> None:
    shapes = [(rows * side, columns * side) for (rows, columns), count in OWNED.items() for _ in range(count)]
    params = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    grads = [param.grad for param in params if param.grad is not None]
    optimizers = [Muon([param]) for param in params]
    lanes = Lanes(device, LANES)

    def beside(works: list[Callable[[], object]]) -> None:
        for work in works:
            lanes.run(work, beside=True)
        lanes.join()

    one_by_one = [lambda grad=grad: orthogonal(grad, SETTINGS) for grad in grads]
    print(f"\n{'ms for the matrices of one rank of eight':60s}")
    print(f"Newton-Schulz, one stream  {milliseconds(lambda: [work() for work in one_by_one]):8.2f}")
    print(f"Newton-Schulz, two streams {milliseconds(lambda: beside(one_by_one)):8.2f}")
    print(f"update, one stream         {milliseconds(lambda: [one.step() for one in optimizers]):8.2f}")
    print(f"update, two streams        {milliseconds(lambda: beside([one.step for one in optimizers])):8.2f}")
    wide = [grad if grad.shape[0] <= grad.shape[1] else grad.mT for grad in grads]
    for name, form in forms().items():
        print(f"{name:26s} {milliseconds(lambda form=form: [form(grad) for grad in wide]):8.2f}", flush=True)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.newton_schulz", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--side", type=at_least(32), default=1600)
    asked = parser.parse_args(sys.argv[1:] if words is None else words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    show_errors(asked.side, device)
    if device.type == "cuda":
        show_times(asked.side, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
