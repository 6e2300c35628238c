from nemo.collections.nlp.models.language_modeling.megatron_bert_model import MegatronBertModel
from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronBertTrainerBuilder
from pretraining import pretrain

if __name__ == "__main__":
    pretrain(MegatronBertTrainerBuilder, MegatronBertModel)
