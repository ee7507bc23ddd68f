"""The models that tests train: each file one idea, each class one structure; sizes are arguments."""
# ruff: noqa: F401, I001
# fmt: off

from tests.models.plain import (
    DIM, Gained, Interleaved, Layers, MeanSquare, NamedPair, Outer, PipelinePart, Repeating, Residual, SmallBlock,
    Stack, blocks,
)
from tests.models.transformers import GPT, GPT_DIM, GPT_VOCAB, AttentionBlock, Language, Resettable, Tables
from tests.models.experts import EXPERTS, StackedBlock, StackedExperts
from tests.models.traits import (
    Adapted, AdaptedBlock, Adapter, AnySize, BetweenTwoNumbers, ChannelsLast, Clamping, Detached, FillingChild,
    FrozenMiddle, ManyDtypes, Odd, Point, Positions, Repeated, Sizes, Tied, Tiny, Twice, TwoWidths,
    Weighed,
)
from tests.models.buffers import (
    Assorted, BufferDtypes, Counting, EveryTrait, ExtraState, Normed, OneBuffer, PositionTable, TiedAndStrided,
    TwoNames,
)
from tests.models.branches import (
    Branches, Chain, Dropping, EndsFirst, Expert, Mixture, NowAndThen, Pair, Passing, Pick, Routed, Skipping,
    SkippingOne, Warming,
)
from tests.models.clip import Clip
from tests.models.outputs import (
    Input, Out, Returning, ReturningBlocks, ReturningNode, ReturningWeight, TakingAny, opened,
)
from tests.models.checkpointed import Borrowing, Checkpointed, CheckpointedTwice, EachCheckpointed, Halves, Nested
from tests.models.recomputed import (
    WIDE, CheckpointInside, DropoutBlock, ManyInputs, ManyInputsNet, Narrowing, Reporting, ReportingNet, RunAgain,
    Squaring, Tower, Turned, WritingInput,
)
from tests.models.torch_modules import (
    Attention, Cells, ConvNet, EncoderDecoder, Listed, Recurrent, Scaling, TransposedConvNet,
)
from tests.models.sequences import GroupedAttention, LongBlock, LongLanguage
from tests.models.tiled import MlpBlock, Speaking
from tests.models.tensor_parallel import (
    GivenGradients, MegatronPairs, MegatronResidual, NoSplitDim, Scaled, Summed, full_tensor,
)
from tests.models.interrupted import Mined, MinedLayers, Thinker, Watched
from tests.models.trees import ExpertsTree, LayerTree, ResidualTree, TransformerTree
from tests.models.cases import GPT_SEQ, MODELS, Case, dict_loss, image_loss, skipping_loss, token_loss, vector_loss
