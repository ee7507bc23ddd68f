"""Real ranks for tests: gloo processes, kept warm between tests or made fresh for one fault.

    from tests.harness import run_ranks

    def my_rank():                                    # at module level: ranks import it by name
        return torch.distributed.get_rank()

    def test_every_rank_knows_its_number():
        assert run_ranks(2, my_rank) == [0, 1]

`run_ranks`         calls a function on every rank of a warm pool, returns one value per rank
`run_ranks_raises`  the same, where every rank must raise
`fresh_ranks`       processes of their own: they may be killed, exit, or set the environment
`start_ranks`       the same with a handle: hear `tell` from inside a rank, kill it, join
`device`            inside a rank: where its models belong
`grids.thinned`     a grid of cases, of which the suite takes a share and --soak all
`soak.Soak`         the fixture `soak`: counts what a long-running test tried, for --soak-record
"""

from tests.harness.device import device
from tests.harness.failures import CaughtError, RankError, RankFailure, RankHang
from tests.harness.fresh import Outcome, RankGroup, fresh_ranks, start_ranks
from tests.harness.pool import run_ranks, run_ranks_raises, shutdown_pools
from tests.harness.worker import tell

__all__ = [
    "CaughtError",
    "Outcome",
    "RankError",
    "RankFailure",
    "RankGroup",
    "RankHang",
    "device",
    "fresh_ranks",
    "run_ranks",
    "run_ranks_raises",
    "shutdown_pools",
    "start_ranks",
    "tell",
]
