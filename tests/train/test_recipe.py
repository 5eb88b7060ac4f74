"""Recipes: built in, from files, changed."""

from pathlib import Path

import pytest

from specwire.errors import InvalidArgumentError
from specwire.train.recipe import RECIPES, Recipe, load_recipe


def test_a_file_builds_on_a_built_in_recipe_and_changes_go_before_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: dspark\nnum_layers: 1\nlearning_rate: 1e-3\nfeature_layers: [2, 5]\n")
    recipe = load_recipe(str(path), ["num_layers=3", "train_seconds=90"])
    assert (recipe.method, recipe.num_layers, recipe.learning_rate, recipe.feature_layers, recipe.train_seconds) == ("dspark", 3, 1e-3, (2, 5), 90.0)
    assert recipe.markov_rank == RECIPES["dspark"].markov_rank


def test_a_recipe_survives_json() -> None:
    values = load_recipe("eagle3", ["feature_layers=[1, 2]"]).to_dict()
    assert Recipe(**values | {"feature_layers": tuple(values["feature_layers"])}) == load_recipe("eagle3", ["feature_layers=[1,2]"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["num_layer=1"], "no field num_layer"),
        (["num_layers"], "write key=value"),
        (["num_layers=0"], "must be at least 1"),
        (["num_steps=1.5"], "must be an integer"),
        (["method=medusa"], "choose one of eagle3, dspark"),
        (["feature_layers=3"], "list of integers"),
        (["train_share=1.5"], "at most 1"),
        (["kl_weight=0", "tv_weight=0"], "more than 0"),
        (["learning_rate=fast"], "must be a number"),
    ],
)
def test_mistakes_are_named(changes: list[str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load_recipe("eagle3", changes)


def test_unknown_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="neither built in"):
        load_recipe("eagle4")
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(InvalidArgumentError, match="mapping"):
        load_recipe(str(path))
    path.write_text("num_layers: 1\n")
    with pytest.raises(InvalidArgumentError, match="names no method"):
        load_recipe(str(path))
