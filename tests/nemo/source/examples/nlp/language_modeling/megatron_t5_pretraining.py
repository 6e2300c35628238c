from nemo.collections.nlp.models.language_modeling.megatron_t5_model import MegatronT5Model
from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronT5TrainerBuilder
from pretraining import pretrain

if __name__ == "__main__":
    pretrain(MegatronT5TrainerBuilder, MegatronT5Model)
