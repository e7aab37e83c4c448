"""Many discriminators at once: stacked parameters, one batched call to train or query.

Parameters, spectral vectors and Adam moments of n modules of one architecture lie in
tensors with a leading client axis. One call works on a chunk of clients: `torch.func`
maps the gradient of one client's loss over the axis, so clients share nothing but the
call. On a GPU and for narrow discriminators on a CPU this beats a Python loop; above
width 32 on a CPU the loop wins (`fedgs bench`), and `config.stacked` decides.

Memory: the state is 3x the parameters (two moments). A call adds the gradients and
activations of one chunk, that is at most CHUNK_SIZE / n of the state plus activations.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedgs.config.run_config import NetworkConfig
from fedgs.gan.losses import discriminator_loss, generator_image_grads
from fedgs.gan.models import ADAM_BETAS, advance_spectral_vectors, build_discriminator
from fedgs.randomness import derived_seed
from fedgs.shapes import Images, Labels, PerSampleGrads, Positions, TensorDict

ADAM_EPSILON = 1e-8  # torch.optim.Adam's default
CHUNK_SIZE = 64  # clients of a node in one batched call; changes the last bits
Function = Callable[..., Any]  # of (network, *batch), pure; or of its tensors


class ModuleStack:
    """n modules of one architecture with their Adam state, stacked.

    Attributes:
        params: name -> (n, ...) float32.
        buffers: name -> (n, ...) float32, the spectral vectors.
        moments: the two Adam moments, each like `params`.
        steps: (n,) int64, Adam steps taken by each module.
    """

    def __init__(
        self,
        build: Callable[[int], nn.Module],
        num_modules: int,
        learning_rate: float,
        betas: tuple[float, float],
        is_stacked: bool,
        device: str,
    ) -> None:
        """Builds module i by `build(i)` for i < num_modules, one after the other."""
        self.template = build(0).to(device)
        self.is_stacked = is_stacked
        self.learning_rate = learning_rate
        self.betas = betas
        self.params = _stack_of(dict(self.template.named_parameters()), num_modules)
        self.buffers = _stack_of(dict(self.template.named_buffers()), num_modules)
        # One after the other: all at once would take the stack's memory again.
        for index in range(num_modules):
            module = build(index)
            for name, param in module.named_parameters():
                self.params[name][index] = param.detach()
            for name, buffer in module.named_buffers():
                self.buffers[name][index] = buffer
        # Adam's averages of gradients, and of their squares.
        first = {name: torch.zeros_like(own) for name, own in self.params.items()}
        second = {name: torch.zeros_like(own) for name, own in self.params.items()}
        self.moments = (first, second)
        self.steps = torch.zeros(num_modules, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Returns n."""
        return len(self.steps)

    def map(self, function: Function, indices: Positions, *batches: Any) -> Any:
        """Calls function(network, *batch) for each listed module.

        Privacy: reads private data; output private.

        Args:
            function: a pure function of one module, as of `network`, and its batch.
            indices: (m,) int64, modules to call.
            *batches: each with a leading axis of length m.
        """
        params, buffers = self.tensors(indices)
        of_tensors = self._of_tensors(function)
        return self._batched(of_tensors)(params, buffers, *batches)

    def ask(self, function: Function, indices: Positions, *shared: Tensor) -> Any:
        """Calls function(network, *shared) for each listed module, as `map`."""
        count = len(indices)
        batches = (value.expand(count, *value.shape) for value in shared)
        return self.map(function, indices, *batches)

    def step(self, loss: Function, indices: Positions, *batches: Any) -> None:
        """Takes one Adam step on each listed module, after one power iteration.

        Privacy: reads private data; output private.

        Args:
            loss: loss(network, *batch) -> scalar, for one module.
            indices: (m,) int64, the modules to train; increasing, no repetition.
            *batches: each with a leading axis of length m.
        """
        params, buffers = self.tensors(indices)
        if buffers:
            buffers = self._batched(advance_spectral_vectors)(params, buffers)
            for name, value in buffers.items():
                self.buffers[name][indices] = value
        of_tensors = grad(self._of_tensors(loss))
        grads = self._batched(of_tensors)(params, buffers, *batches)
        self._adam(indices, params, grads)

    def state(self) -> TensorDict:
        """Returns all tensors under flat names, for `load_state` of an equal stack.

        Privacy: reads private data; output private.
        """
        first, second = self.moments
        groups = {
            "param": self.params,
            "buffer": self.buffers,
            "moment1": first,
            "moment2": second,
        }
        flat: TensorDict = {}
        for prefix, tensors in groups.items():
            for name, value in tensors.items():
                flat[f"{prefix}.{name}"] = value
        flat["steps"] = self.steps
        return flat

    def load_state(self, state: TensorDict) -> None:
        """Copies the tensors of `state()` in.

        Raises:
            ValueError: the names or shapes are those of another architecture.
        """
        own = self.state()
        own_shapes = {name: value.shape for name, value in own.items()}
        shapes = {name: value.shape for name, value in state.items()}
        if own_shapes != shapes:
            raise ValueError("the stored discriminators have another architecture")
        for name, value in state.items():
            own[name].copy_(value)

    # The names of torch's modules
    state_dict = state
    load_state_dict = load_state

    def _batched(self, function: Function) -> Function:
        """Maps a function of one module over the leading axis of its arguments."""
        if self.is_stacked:
            return vmap(function)
        return lambda *args: _loop(function, args)

    def _of_tensors(self, function: Function) -> Function:
        """Returns function(network, *batch) as one of (params, buffers, *batch)."""

        def of_tensors(params: TensorDict, buffers: TensorDict, *batch: Any) -> Any:
            network = self.network(params, buffers)
            return function(network, *batch)

        return of_tensors

    def network(self, params: TensorDict, buffers: TensorDict) -> Callable[..., Any]:
        """Returns one module with these tensors, as a function of its inputs.

        Privacy: reads private data; output private.
        """
        return lambda *inputs: functional_call(self.template, (params, buffers), inputs)

    def chunks(self, indices: Sequence[int]) -> Iterator[Positions]:
        """Splits positions into chunks of at most CHUNK_SIZE, in order."""
        size = chunk_size(self.is_stacked)
        positions = torch.tensor(list(indices), dtype=torch.int64)
        for chunk in positions.split(size):
            if len(chunk):  # no indices split into one empty chunk
                yield chunk.to(self.steps.device)

    def tensors(self, indices: Positions) -> tuple[TensorDict, TensorDict]:
        """Returns the parameters and buffers of the listed modules.

        Privacy: reads private data; output private.
        """
        rows = _rows(indices)
        return _part_of(self.params, rows), _part_of(self.buffers, rows)

    def _adam(self, indices: Positions, params: TensorDict, grads: TensorDict) -> None:
        """Adam of Kingma and Ba (ICLR 2015), Algorithm 1, per module."""
        beta1, beta2 = self.betas
        self.steps[indices] += 1
        # As torch's Adam, which computes its corrections in Python's floats.
        t = self.steps[indices].double()
        step_size = self.learning_rate / (1 - beta1**t)
        step_size = step_size.float()
        correction = (1 - beta2**t).sqrt().float()
        rows = _rows(indices)
        all_first, all_second = self.moments  # m and v
        for name, gradient in grads.items():
            # One number for each module, whatever the shape of its parameter is.
            per_module = [-1] + [1] * (gradient.dim() - 1)
            first = all_first[name][rows]
            first.lerp_(gradient, 1 - beta1)
            second = all_second[name][rows]
            second.mul_(beta2)
            second.addcmul_(gradient, gradient, value=1 - beta2)
            denominator = second.sqrt()
            denominator.div_(correction.view(per_module))
            denominator.add_(ADAM_EPSILON)
            update = first.div(denominator)
            update.mul_(step_size.view(per_module))
            params[name].sub_(update)
            if isinstance(rows, Tensor):  # copies: write them back
                self.params[name][rows] = params[name]
                all_first[name][rows] = first
                all_second[name][rows] = second


class Discriminators(ModuleStack):
    """The discriminators of one node's clients: they never leave the node.

    Privacy: trained on private data; everything in here is private.
    """

    def __init__(
        self,
        config: NetworkConfig,
        client_ids: Sequence[int],
        is_stacked: bool | None = None,
    ) -> None:
        """Initialises one discriminator for each client from (seed, client).

        Args:
            config: a resolved configuration (seed and num_classes set).
            client_ids: the clients, in order.
            is_stacked: train many in one batched call; `config.stacked` when None.
        """
        self.config = config
        if is_stacked is None:
            is_stacked = config.stacked

        def build(index: int) -> nn.Module:
            seed = derived_seed(config.seed, "discriminator", client_ids[index])
            return build_discriminator(config, seed)

        super().__init__(
            build=build,
            num_modules=len(client_ids),
            learning_rate=config.discriminator_learning_rate,
            betas=ADAM_BETAS,
            is_stacked=is_stacked,
            device=config.device,
        )

    def train(self, indices: Positions, *batches: Tensor) -> None:
        """Takes one discriminator step for each listed client.

        Privacy: reads private data; output private.

        Args:
            indices: (n,) positions of the clients in this stack.
            *batches: real images (n, b, C, S, S) in [0, 1] and their labels (n, b),
                the same of fakes, and the weights of the mixes (n, b) in [0, 1).
        """
        self.step(discriminator_loss, indices, *batches)

    def only(self, index: int) -> "Discriminators":
        """Returns a stack of one client's discriminator; it shares memory with this.

        Privacy: reads private data; output private.
        """
        alone = copy.copy(self)
        one = slice(index, index + 1)
        first, second = self.moments
        alone.params = _part_of(self.params, one)
        alone.buffers = _part_of(self.buffers, one)
        alone.moments = (_part_of(first, one), _part_of(second, one))
        alone.steps = self.steps[one]
        return alone

    def query(
        self,
        indices: Positions,
        images: Images,
        labels: Labels,
    ) -> PerSampleGrads:
        """Returns every listed client's gradient for every image; changes no state.

        Privacy: reads private data; output private.

        Args:
            indices: (n,) positions of the clients.
            images: (B, C, S, S), the same for all clients.
            labels: (B,).

        Returns:
            (n, B, C, S, S), the gradients of L_G = -D(x, y) without 1/B.
        """
        return self.ask(generator_image_grads, indices, images, labels)


def chunk_size(is_stacked: bool) -> int:
    """Returns how many clients one call works on, at most."""
    if is_stacked:
        return CHUNK_SIZE
    return 1


def num_chunks(num_clients: int, is_stacked: bool) -> int:
    """Returns how many chunks so many clients are split into.

    >>> num_chunks(70, is_stacked=True), num_chunks(70, is_stacked=False)
    (2, 70)
    """
    return math.ceil(num_clients / chunk_size(is_stacked))


def _rows(indices: Positions) -> Tensor | slice:
    """Returns a slice, whose views need no copies, where the indices are contiguous."""
    first = int(indices[0])
    count = len(indices)
    if int(indices[-1]) - first == count - 1:
        return slice(first, first + count)
    return indices


def _part_of(tensors: TensorDict, rows: Tensor | slice) -> TensorDict:
    """Returns the tensors of some modules."""
    return {name: value[rows] for name, value in tensors.items()}


def _stack_of(tensors: TensorDict, num: int) -> TensorDict:
    """Returns zeros for `num` modules whose tensors are like these."""
    stack: TensorDict = {}
    for name, value in tensors.items():
        stack[name] = value.detach().new_zeros(num, *value.shape)
    return stack


def _loop(function: Function, args: Sequence[Any]) -> Any:
    """What vmap(function)(*args) computes, one module at a time."""
    # Of a module without buffers there is no end of `{}`.
    rows = zip(*map(_rows_of, args), strict=False)
    results = [function(*row) for row in rows]
    if not isinstance(results[0], dict):
        return torch.stack(results)
    stacked: TensorDict = {}
    for name in results[0]:
        stacked[name] = torch.stack([result[name] for result in results])
    return stacked


def _rows_of(arg: Tensor | TensorDict) -> Iterable[Tensor | TensorDict]:
    """Returns what each module gets of an argument; without tensors, `{}` for each."""
    if isinstance(arg, Tensor):
        return arg.unbind()
    if arg:
        rows = zip(*arg.values(), strict=True)
    else:
        rows = itertools.repeat(())
    return (dict(zip(arg, row, strict=True)) for row in rows)
