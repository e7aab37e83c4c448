"""Feature means: a phase releases the mean features of every class, once.

    server                                        node, for its clients
    begin --- a feature network, a centre ----->  answer: mean features, less the centre
    finish <----- the sum over all clients -----  (each clipped as a whole, noise once)
    settle: the refiner's fit, after features

Discriminators that are linear over fixed features use nothing of the images but the
means of these features. One release of the means therefore replaces all rounds of such
discriminators. `fedgs/feature_means.py` shows the default's phases on one page.

    means, scatter, moments, parts   set the Gaussians of the generator
    features, pretrained-features    fit the refiner behind them

Source: docs/privacy.md, "Embedding releases".
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from fedgs.config.feature_settings import (
    PRETRAINED,
    MomentSettings,
    PretrainedSettings,
    TrunkSettings,
)
from fedgs.config.run_config import FeatureConfig, MomentConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.gan import refinement
from fedgs.gan.features import KINDS, MeanFeatures, embedding, mean_features
from fedgs.gan.fit import Fit
from fedgs.gan.models import GeneratorRefined, build_generator
from fedgs.gan.moments import expected, in_parts, model_of, set_generator
from fedgs.gan.public_networks import refiner_of_fonts
from fedgs.gan.torchvision_network import chosen_network
from fedgs.methods.base import Declared, Method, OneClient, Released, Request, State
from fedgs.methods.public_data import public_start
from fedgs.methods.schedule import EVERYONE
from fedgs.randomness import derived_seed
from fedgs.shapes import TensorDict

# Name of what clients subtract, beside the network's tensors in a request.
EXPECTED = "expected"
FeatureConfigT = TypeVar("FeatureConfigT", bound=FeatureConfig)


class FeatureMeans(Method[FeatureConfigT]):
    """Clients answer with the mean features of their images, once."""

    # One release is all that a phase has: losing it would lose its share of the
    # privacy.
    commits_every_round = True
    # A client embeds all its images, so the time would tell how many it has.
    hides_duration = True

    @abstractmethod
    def network(
        self,
        config: FeatureConfigT,
        state: State,
    ) -> tuple[TensorDict, Tensor]:
        """Returns the phase's feature network, and what clients subtract.

        Privacy: post-processing of DP output.

        Returns:
            The network, and the centre: shape (groups, features), float32.
        """

    @abstractmethod
    def learn(self, config: FeatureConfigT, state: State) -> None:
        """Changes the generator by the last of the state's releases.

        Privacy: post-processing of DP output.
        """

    def terms(self, config: FeatureConfigT, round: int) -> Terms:
        """Returns one embedding, clipped to C, by group and feature."""
        return config.phase_terms(round)

    def state(self, config: FeatureConfigT) -> State:
        """Initialises the generator and its average from the seed."""
        seed = derived_seed(config.seed, "generator")
        return State.of(build_generator(config, seed).to(config.device))

    def declared(self, config: FeatureConfigT, round: int) -> Mapping[str, Declared]:
        """Returns the tensors of the feature network, and what clients subtract."""
        shapes = KINDS[config.method].shapes(config)
        named = {name: Declared(shape) for name, shape in shapes.items()}
        return named | {EXPECTED: Declared((config.num_groups, config.num_features))}

    def begin(self, config: FeatureConfigT, state: State) -> tuple[Request, Request]:
        """Makes the phase's feature network and what clients subtract.

        Privacy: post-processing of DP output.
        """
        network, centre = self.network(config, state)
        # Everybody is asked, which is what a request means unless it says otherwise.
        request = Request(state.round + 1, network | {EXPECTED: centre})
        # `finish` needs the same network: the released numbers are its features.
        return request, request

    def check(self, config: FeatureConfigT, request: Request) -> None:
        """Refuses a release of some clients only."""
        # The plan has every client in this release, so no honest server asks for less.
        if (request.participants, request.trainees) != (EVERYONE, EVERYONE):
            raise UserError("request for mean features that is not to all: refused")

    def answer(
        self,
        config: FeatureConfigT,
        client: OneClient,
        request: Request,
    ) -> Tensor:
        """Returns the client's embedding: one sample, which is clipped as a whole.

        Privacy: reads private data; output private.
        """
        network: TensorDict = {}
        for name, value in request.tensors.items():
            network[name] = value.to(config.device)
        centre = network.pop(EXPECTED)
        images, labels = client.tensors(config.device)
        chosen = chosen_network(config)
        answered = embedding(config.method, network, centre, images, labels, chosen)
        return answered[None, None]

    def finish(
        self,
        config: FeatureConfigT,
        state: State,
        pending: Request,
        released: Released,
    ) -> None:
        """Keeps the released means, and changes the generator by them.

        Privacy: post-processing of DP output.
        """
        network = dict(pending.tensors)
        centre = network.pop(EXPECTED)
        found = mean_features(
            config,
            network,
            centre,
            total=released.total[0, 0],
            noise_std=released.noise_std,
        )
        # Kept for later phases, whose networks are made of it; `learn` reads it there.
        state.released.append((config.method, found.tensors()))
        self.learn(config, state)
        state.round += 1


class ClassMoments(FeatureMeans[MomentConfig]):
    """Means, scatter, moments and parts: they set the generator's Gaussians."""

    Settings = MomentSettings

    def network(self, config: MomentConfig, state: State) -> tuple[TensorDict, Tensor]:
        """Returns the model so far as a network, and what it expects."""
        start, _ = public_start(config)
        model = model_of(config, released_so_far(state), start)
        if config.method == "parts":
            # Each class is cut into parts before clients measure the parts.
            model = in_parts(model)
        centre = expected(model, config.method, config.num_groups, config.num_features)
        return model.network, centre

    def learn(self, config: MomentConfig, state: State) -> None:
        """Sets the Gaussians of the generator and of its average."""
        # The model is a function of all releases, so a resumed run makes the same one.
        start, _ = public_start(config)
        model = model_of(config, released_so_far(state), start)
        set_generator(config, model, state.generator, state.ema)


class Features(FeatureMeans[FeatureConfig]):
    """Layers of public networks: the refiner is fitted to their means."""

    Settings = TrunkSettings

    def join(self, config: FeatureConfig, state: State) -> None:
        """Starts the refiner as one that was trained on fonts, for public networks.

        Raises:
            UserError: the run's features are of a network that is not here.
        """
        # Called before the first round, and again where a run is resumed, so that a
        # missing network is missed before anything is released.
        chosen_network(config)
        if config.method == PRETRAINED:
            for generator in refined(state):
                start = refiner_of_fonts(config)
                # Not strict: there are no weights for other shapes or numbers of
                # classes, which then start at random.
                generator.refiner.load_state_dict(start, strict=False)

    def network(self, config: FeatureConfig, state: State) -> tuple[TensorDict, Tensor]:
        """Returns scales and means of features of images that the generator draws."""
        # The scales get no noise, so they are computed from images that the generator
        # draws, and never from private ones.
        return refinement.reference(config, state.ema)

    def learn(self, config: FeatureConfig, state: State) -> None:
        """Does nothing yet: the fit takes minutes, and `settle` does it."""

    def settle(
        self,
        config: FeatureConfig,
        state: State,
        fit: Fit,
    ) -> bool:
        """Fits the refiner to the released means.

        Privacy: post-processing of DP output.
        """
        generator, average = refined(state)
        release = released_so_far(state)[-1]
        refinement.refine(config, release, generator, average, fit)
        return True


class PretrainedFeatures(Features):
    """Layers of networks that have seen public images."""

    Settings = PretrainedSettings


MEANS = SCATTER = MOMENTS = PARTS = ClassMoments()
FEATURES = Features()
PRETRAINED_FEATURES = PretrainedFeatures()


def released_so_far(state: State) -> list[MeanFeatures]:
    """Returns the mean features that phases have released, in their order."""
    found: list[MeanFeatures] = []
    for method, tensors in state.released:
        if method in KINDS:  # methods of others may hand on what they like
            found.append(MeanFeatures.of(method, tensors))
    return found


def refined(state: State) -> tuple[GeneratorRefined, GeneratorRefined]:
    """Returns the generator and its average, which have a refiner.

    Raises:
        TypeError: they have no refiner, which settings that were checked rule out.
    """
    generator = state.generator
    average = state.ema
    if not isinstance(generator, GeneratorRefined):
        raise TypeError("no other generator is fitted to features")
    if not isinstance(average, GeneratorRefined):
        raise TypeError("no other generator is fitted to features")
    return generator, average
