"""Where in a config a complaint's field is."""

from raafl.config.messages import place_of_field


def test_the_line_of_a_field_in_the_last_config_that_has_it(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("clients: 2\ndata:\n  class_path: x\n")
    second.write_text("clients: 3\n")
    argv = ["simulate", "--config", str(first), f"--config={second}"]
    assert place_of_field("data", argv) == f" (data is in {first}, line 2)"
    assert place_of_field("data", [*argv, "--data.path", "y"]) == ""
    assert place_of_field("model", argv) == "" == place_of_field(None, argv)
