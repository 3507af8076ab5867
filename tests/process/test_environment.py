"""Launchers that set PMI's variables, and variables that are no numbers."""

import pytest

from trainer.errors import ConfigError
from trainer.process.environment import Place, detect

MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_mpich():
    assert detect(MPICH | {"MASTER_ADDR": "a"}, devices=4, nodes=2) == Place(5, 8, 1, 4, "", "mpirun")
    assert detect(MPICH | {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}).world == 1
    with pytest.raises(ConfigError, match=r"^mpirun: 8 ranks need a meeting point; .* -genv MASTER_ADDR <first host>"):
        detect(dict(MPICH))


def test_an_unknown_launcher_is_refused_instead_of_training_many_times():
    with pytest.raises(ConfigError, match=r"^PMI_SIZE=3: a launcher that Echelon doesn't know"):
        detect({"PMI_RANK": "0", "PMI_SIZE": "3"})
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    step |= {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a"}
    assert detect(step | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "srun"  # which sets these, too


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "-1")])
def test_a_variable_that_is_no_number_is_named(name, value):
    with pytest.raises(ConfigError, match=f"^{name}={value}: is no number"):
        detect({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | {name: value})
