"""`train.model`: the networks that the recipes can train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.location import model_problem
from trainyard_trainer.config.section import Endpoint, Fraction, PositiveNumber, Section


def _require_model_location(path: str) -> str:
    if (problem := model_problem(path)) is not None:
        raise PydanticCustomError("location", "{problem}", {"problem": problem})
    return path


ModelLocation = Annotated[str, AfterValidator(_require_model_location)]
"""A path of this machine, `s3://bucket/prefix`, or `hf://org/name@revision`."""


class Model(Section):
    """The settings of a torchvision classification model."""

    name: str
    """The model's name in torchvision, such as `resnet18`."""

    in_channels: PositiveInt
    """Channels of an image: 1 for grey, 3 for colour."""

    num_classes: PositiveInt
    """How many classes there are."""

    image_size: PositiveInt = 32
    """Side in pixels to which images are resized on the device."""


class Gpt(Section):
    """The settings of a transformer that predicts the next byte, or the next token, of a text."""

    layers: PositiveInt
    """Number of transformer blocks, each with attention and a two-layer network."""

    heads: PositiveInt
    """Number of attention heads of each block; it must divide the width."""

    width: PositiveInt
    """Embedding size: the number of values that represent each token between blocks."""

    context_length: Annotated[int, Field(ge=2, le=2**16)]
    """Context length in tokens, which is also the length of a sample."""

    dropout: Fraction = 0.0
    """Share of activations that are set to 0 at random during training."""

    tokenizer: ModelLocation | None = None
    """The folder of a tokenizer that Transformers loads, such as one of `trainyard data tokenizer`: a path,
    `s3://bucket/prefix`, or `hf://org/name@revision` of the Hugging Face Hub. Without it, each byte is a
    token."""

    endpoint: Endpoint | None = None
    """The address of the S3 server of a tokenizer in a bucket. The default is the endpoint of the storage, or
    AWS."""

    vocab_size: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """The number of tokens that the model knows: of files of tokens without a tokenizer, or more tokens than
    the tokenizer has, such as a multiple of 64. The default is the number of the tokenizer."""

    end_of_text: NonNegativeInt | None = None
    """The token between documents in files of tokens without a tokenizer, such as 50256 of GPT-2. Without
    one, documents see each other."""

    @property
    def has_tokens(self) -> bool:
        """Whether it learns tokens, not bytes."""
        return self.tokenizer is not None or self.vocab_size is not None

    @model_validator(mode="after")
    def _end_of_text_is_a_token(self) -> Gpt:
        if self.end_of_text is None:
            return self
        if self.tokenizer is not None or self.vocab_size is None:
            raise PydanticCustomError(
                "one_of",
                "end_of_text is for files of tokens: it needs vocab_size, and no tokenizer, which has "
                "its own",
            )
        if self.end_of_text >= self.vocab_size:
            raise PydanticCustomError(
                "one_of",
                f"end_of_text = {self.end_of_text} is no token of a vocab_size of {self.vocab_size}",
            )
        return self

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Gpt:
        if self.width % self.heads:
            below = self.width // self.heads * self.heads or self.heads
            raise PydanticCustomError(
                "one_of",
                f"width = {self.width} cannot be shared evenly by heads = {self.heads}; "
                f"use a width of {below} or {below + self.heads}",
            )
        return self


class Lora(Section):
    """The settings of an adapter: small trained matrices beside frozen weights (LoRA)."""

    kind: Literal["lora"]
    """The kind of adapter."""

    rank: PositiveInt = 16
    """The inner size of the two matrices beside each target."""

    alpha: PositiveNumber = 16.0
    """The factor of what the matrices add is `alpha / rank`, with `rslora` `alpha / sqrt(rank)`."""

    dropout: Fraction = 0.0
    """The share of a target's inputs that its matrices do not see in training, at random."""

    targets: (
        Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    ) = "all-linear"
    """The modules with an adapter: `all-linear` is each linear layer but the output layer; or a list of the
    ends of their names, such as `[q_proj, v_proj]`."""

    rslora: bool = False
    """Scale by the square root of the rank (rank-stabilised LoRA)."""

    dora: bool = False
    """Train the length of each weight's rows as well (DoRA)."""


class CausalModel(Section):
    """The settings of a language model of Transformers."""

    path: ModelLocation
    """The model's folder with `config.json`, files of safetensors, and its tokenizer: a path on the storage
    or on a volume, `s3://bucket/prefix`, or `hf://org/name@revision` of the Hugging Face Hub."""

    endpoint: Endpoint | None = None
    """The address of the S3 server of a folder in a bucket. The default is the endpoint of the storage, or
    AWS."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Start from the weights of the folder (`pretrained`), or from random weights (`random`)."""

    adapter: Lora | None = None
    """Train an adapter and leave the weights as they are. Without it, all weights are trained."""

    attention: Literal["auto", "eager", "sdpa", "flash", "flex"] = "auto"
    """The implementation of attention: Transformers' own choice (`auto`), plain PyTorch (`eager`), PyTorch's
    fused kernels (`sdpa`), FlashAttention 2 (`flash`, which the image lacks), or FlexAttention (`flex`)."""

    gradient_checkpointing: bool = False
    """Keep only the inputs of each block for the backward pass, and compute the rest again: slower, and it
    needs less memory."""
