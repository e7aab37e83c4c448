"""When the random selection of clients may count as protection: all in public settings.

Source: docs/privacy.md, "Which theorem may be used when".
"""

DEPLOYED = (
    "in a deployment every node knows when it is asked, and the network sees which "
    "nodes answer"
)  # so amplification, whose condition is that nobody learns it, is never claimed there
PUBLIC_SELECTION = (
    "who takes part follows from seed, which a published generator tells (noise_seed "
    "is given, or the run is of an earlier version)"
)


def why_not_amplified(
    client_selection: str,
    discriminator_training: str,
    largest_node: int = 1,
    clients_per_round: int | None = None,
    num_clients: int | None = None,
    is_seeded: bool = False,
) -> str:
    """Returns which condition of amplification fails; "" if all that is known hold.

    That nobody outside the server learns who was selected is the user's promise.

    Args:
        client_selection: as in `Settings`, as all others.
        discriminator_training: selected, every_round or frozen.
        largest_node: most clients on one node.
        clients_per_round: m; None is unknown.
        num_clients: K; None is unknown.
        is_seeded: whether noise_seed is given.

    Source: docs/privacy.md, "Which theorem may be used when", 2.
    """
    everybody = num_clients is not None and clients_per_round == num_clients
    if client_selection == "all" or everybody:
        return "every client takes part in every round, so nothing is sampled"
    if client_selection != "uniform":
        return f"client_selection = {client_selection} does not draw each round anew"
    if is_seeded:
        return PUBLIC_SELECTION
    if discriminator_training == "selected":
        return (
            "discriminator_training = selected: only the selected client trains, so a "
            "later release of another client can tell who was selected before"
        )
    if largest_node > 1 and (num_clients is None or largest_node < num_clients):
        return (
            f"clients_per_node or node_sizes: a node hosts up to {largest_node} "
            "clients, so how many nodes answer, hence the noise, depends on who is "
            "selected"
        )
    return ""


REFUSAL_TELLS = "a client's refusal tells how often it was selected"
