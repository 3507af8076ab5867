from trainer.precision.formats import Precision as Precision
