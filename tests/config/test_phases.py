# ------------------------------------------------------------------ shares


def test_shares_are_of_the_privacy_spent():
    """Weights of mu^2 as the recipes' notes say them: four fifths before the rounds."""
    found = shares_of(recipe("feature-means-gs-wgan"))
    assert found == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.2])
    assert shares_of(recipe("algorithm-1")) == [1.0]
