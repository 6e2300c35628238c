from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronTrainerBuilder
from pretraining import pretrain

if __name__ == "__main__":
    pretrain(MegatronTrainerBuilder, MegatronGPTModel)
