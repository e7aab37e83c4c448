"""Which sites' images differ from those of all others, and by which bug?

Each site has G groups. A step asks about the R sites that remain whether any of them
differs, by one exact test at the level alpha: the sum over sites of the statistic by
which `diagnosis` sees any difference of a site from all others, among arrangements of
all groups in R sites. If it is significant, the site that lies furthest from the others
is taken out with its diagnosis against them, and the rest is asked again. The reason
for taking it out: if of A, B and C the images of C are transposed, A truly differs from
B and C together, by half of a transpose, and must not be named for that.

**What is exact.** While all sites that remain are alike, any of them is named with
probability at most alpha. Proof: all groups that remain are exchangeable, so the test
rejects with at most this probability; and a site is only named in a step in which it
rejects. The sites without a bug are one fixed set, so this holds for the step to which
they are left, and a later step only follows a rejection in it.

One test for all sites and not R tests at alpha / R: those could not see one bug in two
of five sites. Of their 8 groups any 4 lie as far from the others as those of one site,
so with G = 4 none of the R p-values is below C(8, 4) / C(20, 4), 1/69.

**What is a model: that the right site is taken out first.** Fewer than half of the
sites are taken to have a bug. Then the site whose mean is furthest from that of the
others has one, whatever the bugs are. Proof: let m of R sites have one, and v be how
far an intact site lies from the mean of all. Deviations from it add up to 0, so those
of the m add up to (R - m) |v|, and one of them is at least (R - m) / m |v| > |v| long.
What a bug explains has no such order: B and C with other bugs make a part of each
other's. The distance is estimated without bias. Another site that is not clearly less
distant, with confidence, in the classes that both sites have, is a *rival*. Rivals are
compared once more, each alone with those that are none: where two sites have a bug,
either stands out. Where that does not tell, or half of the sites are rivals, the
verdict is "one of these sites". Nobody is named whose own diagnosis sees nothing.

Of two sites a difference does not say which one differs, except by a bug that nothing
undoes: the same entry in the other site, at any degree, explains clearly less, below
`LEAST_FIT` of what it explains in this one.

Privacy: post-processing of DP output.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.data.transformations import TRANSFORMATIONS, Transformation
from fedgs.diagnosis import permutation
from fedgs.diagnosis.catalogue import SUSPICIOUS, Candidate, CohortSamples
from fedgs.diagnosis.diagnosis import (
    LEAST_FIT,
    NAMED,
    POSSIBLE,
    Diagnosis,
    differences_of_splits,
    judge,
    samples_of,
)
from fedgs.diagnosis.products import Products, are_seen, over_classes
from fedgs.diagnosis.rule import Rule
from fedgs.errors import raise_if_any
from fedgs.evaluation.images import LabelledImages

Array = NDArray[np.float64]
Rows = NDArray[np.bool_]
_ROUNDING = 1e-9  # of sums of the same numbers in another order
Sites = Mapping[str, Sequence[LabelledImages]]


@dataclass(frozen=True)
class SiteVerdict:
    """What is said of one site; see the module.

    Attributes:
        site: its name.
        others: the names of those that it was compared with.
        diagnosis: of the site, which is the suspicious cohort, against the others that
            remained in its last step. What it says of a site that is not accused may be
            the fault of another one.
        p: that the site is like the others, for all sites together: at most alpha is
            significant.
        is_accused: whether the site is named. By which bug says the diagnosis, which
            may be none of the catalogue's.
        rivals: other sites of which one, or this one, differs; nobody is named then.
    """

    site: str
    others: tuple[str, ...]
    diagnosis: Diagnosis
    p: float
    is_accused: bool = False
    rivals: tuple[str, ...] = ()


def compare_sites(
    sites: Sites,
    num_classes: int,
    num_frequencies: int,
    rule: Rule | None = None,
    entries: Sequence[Transformation] = TRANSFORMATIONS,
) -> dict[str, SiteVerdict]:
    """Compares every site with all others; the module says how.

    While all sites that remain are alike, any is named with probability at most alpha:
    a site is only named in a step whose one test of all these sites rejects, and that
    is exact, because all their groups are exchangeable.

    Privacy: post-processing of DP output.

    Args:
        sites: at least 2; a site's name to the mean pictures of each of its G groups, G
            from 4 to 6. All groups have equally many owners.
        num_classes: of the labels.
        num_frequencies: see `fedgs.diagnosis.diagnosis.diagnose`.
        rule: its alpha is for all sites together; the default rule if None.
        entries: the catalogue.

    Returns:
        A verdict for every site, in the order of `sites`.

    Raises:
        UserError: sites that cannot be compared.
    """
    raise_if_any("sites", _problems(sites))
    question = _Question(
        sites=sites,
        num_classes=num_classes,
        num_frequencies=num_frequencies,
        rule=rule or Rule(),
        entries=entries,
    )
    verdicts = dict[str, SiteVerdict]()
    remaining = tuple(sites)
    least_p = 0.0
    while len(remaining) > 1:  # one alone has nobody to be compared with
        step = question.step(remaining, least_p)
        verdicts |= step
        out: set[str] = set()
        for site, found in step.items():
            if found.is_accused or found.rivals:
                out.add(site)
        if not out:
            break
        # The next step is asked only because this one rejected.
        least_p = min(step[site].p for site in out)
        remaining = tuple(site for site in remaining if site not in out)
    return {site: verdicts[site] for site in sites}


def _problems(sites: Sites) -> Iterator[str]:
    """Yields what is wrong with the number of sites, or of their groups."""
    if len(sites) < 2:
        yield f"{len(sites)} given: give at least 2, to be compared with each other"
    counts = {site: len(groups) for site, groups in sites.items()}
    if len(set(counts.values())) > 1:
        yield f"groups = {counts}: give every site the same number"


@dataclass(frozen=True)
class _Comparison:
    """Some sites, each of which can be compared with the others.

    Attributes:
        names: of the sites.
        samples: of all their groups, site by site; the last site is suspicious.
        candidates: of the samples.
    """

    names: tuple[str, ...]
    samples: CohortSamples
    candidates: Sequence[Candidate]

    @property
    def _num_groups(self) -> int:
        """Number of groups of each site."""
        return len(self.samples.means) // len(self.names)

    @property
    def _site_of(self) -> NDArray[np.int64]:
        """The number of every group's site."""
        return np.repeat(np.arange(len(self.names)), self._num_groups)

    def against_others(self, site: str) -> CohortSamples:
        """Returns the samples, one site of which is the suspicious cohort."""
        number = self.names.index(site)
        further_on = (number + 1) * self._num_groups
        # The last site is suspicious in `rows`; rolled on, this one is in its place.
        rows = np.roll(self.samples.rows, further_on, axis=1)
        return self.samples.split_by(rows)

    def p_alike(self) -> float:
        """Returns p of the exact test whether all sites are alike; see the module."""
        arrangements = permutation.arrangements(len(self.names), self._num_groups)
        total = np.zeros(len(arrangements))
        # Over all sites: nobody has chosen one of them before the test.
        for number in range(len(self.names)):
            by_site = self.samples.split_by(arrangements == number)
            total += differences_of_splits(by_site)
        return permutation.p_value(total)

    def tied(self) -> list[str]:
        """Returns the most distant site, and its rivals."""
        numbers = range(len(self.names))
        of_sites = [(self._site_of == number)[None] for number in numbers]
        gram = self.samples.gram
        squared = [_squared(gram, of_sites, number)[0] for number in numbers]
        first = int(np.argmax(squared))
        found = [self.names[first]]
        for other, name in enumerate(self.names):
            if other == first:
                continue

            # A site that has more classes than another one is further from the others.
            common = tuple(
                part
                for part in gram
                if are_seen(of_sites[first] & part.is_known).all()
                and are_seen(of_sites[other] & part.is_known).all()
            )

            # Both are bound now, for the loop moves on.
            def gap(*rows: Rows, other: int = other, parts: Products = common) -> Array:
                of_first = _squared(parts, rows, first)
                of_other = _squared(parts, rows, other)
                # Two sites that alone have some classes are equally far from each
                # other there, but for the last bits.
                return (1 - _ROUNDING) * of_first - of_other

            if not permutation.is_above_zero(gap, self._site_of):
                found.append(name)
        return found

    def is_surely_spoilt(self, site: str, diagnosis: Diagnosis) -> bool:
        """Tells whether what was found says that this one of two sites is spoilt."""
        bugs: set[str] = set()
        for suspect in diagnosis.ranking:
            if suspect.decision in (NAMED, POSSIBLE):
                if suspect.spoilt != SUSPICIOUS:
                    return False
                bugs.add(suspect.bug)
        if not bugs:
            return False
        # One degree of an entry may undo another one: brighter here is darker there.
        # The degrees are coarse, so the wrong one may even explain a little more.
        here: list[Candidate] = []
        there: list[Candidate] = []
        for candidate in self.candidates:
            if candidate.name in bugs:
                if candidate.spoilt == SUSPICIOUS:
                    here.append(candidate)
                else:
                    there.append(candidate)

        def gap(healthy: Rows, suspicious: Rows) -> Array:
            by_this = _most_explained(here, healthy, suspicious)
            by_other = _most_explained(there, healthy, suspicious)
            return LEAST_FIT * by_this - by_other

        return permutation.is_above_zero(gap, self.against_others(site).cohorts)


def _most_explained(
    candidates: Sequence[Candidate],
    healthy: Rows,
    suspicious: Rows,
) -> Array:
    """Returns what the best of some candidates explains, for each row."""
    explained = [own.explained(healthy, suspicious) for own in candidates]
    return np.max(explained, axis=0)


def _squared(parts: Products, of_sites: Sequence[Rows], number: int) -> Array:
    """Returns the squared distance of a site from all others, without bias."""
    own = of_sites[number]
    everyone = np.any(of_sites, axis=0)
    return over_classes(parts, everyone & ~own, own, permutation.squared_distance)


@dataclass(frozen=True)
class _Question:
    """What `compare_sites` was asked; see there."""

    sites: Sites
    num_classes: int
    num_frequencies: int
    rule: Rule
    entries: Sequence[Transformation]

    def step(
        self,
        remaining: tuple[str, ...],
        least_p: float,
    ) -> dict[str, SiteVerdict]:
        """Returns verdicts after one step: those named or rivals are to be taken out.

        Args:
            remaining: at least 2 sites.
            least_p: of the step before; a p-value that is adjusted never falls.
        """
        everyone = self._comparison(remaining)
        least_p = max(least_p, everyone.p_alike())
        found = {site: self._verdict(everyone, site, least_p) for site in remaining}
        if least_p > self.rule.alpha:
            return found
        tied = everyone.tied()
        named = self._named(everyone, tied, found, least_p)
        for own in named:
            found[own.site] = dataclasses.replace(own, is_accused=True)
        if not named:
            for site in tied:
                rivals = tuple(other for other in tied if other != site)
                found[site] = dataclasses.replace(found[site], rivals=rivals)
        return found

    def _named(
        self,
        everyone: _Comparison,
        tied: Sequence[str],
        found: Mapping[str, SiteVerdict],
        least_p: float,
    ) -> list[SiteVerdict]:
        """Returns the verdicts of those who differ, among the most distant sites."""
        if len(everyone.names) == 2:
            spoilt: list[SiteVerdict] = []
            for own in found.values():
                if everyone.is_surely_spoilt(own.site, own.diagnosis):
                    spoilt.append(own)
            return spoilt
        # The model of the module: fewer than half of the sites have a bug.
        if 2 * len(tied) >= len(everyone.names):
            return []
        verdicts = [found[site] for site in tied]
        # Where two sites have a bug, either stands out among those that are no rivals.
        if len(tied) > 1:
            undisputed = tuple(name for name in everyone.names if name not in tied)
            verdicts = []
            for site in tied:
                comparison = self._comparison((*undisputed, site))
                if comparison.tied() == [site]:
                    verdicts.append(self._verdict(comparison, site, least_p))
        return [own for own in verdicts if own.p <= self.rule.alpha]

    def _comparison(self, names: tuple[str, ...]) -> _Comparison:
        """Returns the samples of some sites.

        Raises:
            UserError: groups that cannot be compared.
        """
        *others, last = names
        healthy: list[LabelledImages] = []
        for name in others:
            healthy.extend(self.sites[name])
        samples = samples_of(
            healthy,
            suspicious=self.sites[last],
            num_classes=self.num_classes,
            num_frequencies=self.num_frequencies,
        )
        candidates = samples.candidates(self.entries)
        return _Comparison(names, samples, candidates)

    def _verdict(
        self,
        comparison: _Comparison,
        site: str,
        least_p: float,
    ) -> SiteVerdict:
        """Returns the verdict of one site of a comparison, which names nobody yet."""
        diagnosis = judge(
            comparison.against_others(site),
            comparison.candidates,
            self.entries,
            self.rule,
        )
        # No site is named by more than the test of all sites together allows.
        return SiteVerdict(
            site=site,
            others=tuple(name for name in comparison.names if name != site),
            diagnosis=diagnosis,
            p=max(least_p, diagnosis.p),
        )
