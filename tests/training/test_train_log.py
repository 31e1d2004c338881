"""What a resumed run reads back."""

from megatron_ep.training import log as train_log


def test_a_row_that_was_cut_short_is_left_out(tmp_path) -> None:
    path = tmp_path / "loss.csv"
    row = train_log.Row(
        step=1, loss=5.5, tokens_per_second=9.0, dispatch_share=0.5, lr=1e-3, grad_norm=1.0, seconds=2.0
    )
    names = list(vars(row))
    path.write_text("\n".join([",".join(names), ",".join(str(getattr(row, name)) for name in names), "2,5.4"]))
    assert train_log._read(path) == [row]
    assert train_log._read(tmp_path / "none.csv") == []
