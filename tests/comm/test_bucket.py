"""A bucket is cut into pieces of its parameters, whatever is asked for."""

import torch

from trainer.comm.bucket import Bucket, Piece


def test_a_bucket_is_cut_into_pieces_of_its_parameters():
    a, b = torch.zeros(2, 3), torch.zeros(4)
    bucket = Bucket.of([a, b], step=7)
    flat = torch.arange(10.0)
    assert [tuple(view.shape) for view in bucket.split(flat)] == [(2, 3), (4,)]
    cut = bucket.cut(4, 9)
    assert (bucket.numel(), cut.numel()) == (10, 5)
    assert cut.pieces == (Piece(a, 4, 6), Piece(b, 0, 3)) and cut.step == 7
    assert [view.tolist() for view in cut.split(flat[4:9])] == [[4, 5], [6, 7, 8]]
    assert cut.cut(1, 3).pieces == (Piece(a, 5, 6), Piece(b, 0, 1))
    assert bucket.cut(8, 99).pieces == (Piece(b, 2, 4),)
    assert bucket.cut(10, 99).pieces == ()
