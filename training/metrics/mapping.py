"""The class of each metric that a `MetricsConfig` can ask for."""

from __future__ import annotations

from tessera.training.metrics.accuracy import AccuracyMetric
from tessera.training.metrics.auc import AUCMetric
from tessera.training.metrics.auprc import AUPRCMetric
from tessera.training.metrics.average import AverageMetric
from tessera.training.metrics.cali_free_ne import CaliFreeNEMetric
from tessera.training.metrics.calibration import CalibrationMetric
from tessera.training.metrics.calibration_with_recalibration import RecalibratedCalibrationMetric
from tessera.training.metrics.ctr import CTRMetric
from tessera.training.metrics.hindsight_target_pr import HindsightTargetPRMetric
from tessera.training.metrics.mae import MAEMetric
from tessera.training.metrics.metrics_config import RecMetricEnum, RecMetricEnumBase
from tessera.training.metrics.mse import MSEMetric
from tessera.training.metrics.multi_label_precision import MultiLabelPrecisionMetric
from tessera.training.metrics.multiclass_recall import MulticlassRecallMetric
from tessera.training.metrics.ndcg import NDCGMetric
from tessera.training.metrics.ne import NEMetric
from tessera.training.metrics.ne_positive import NEPositiveMetric
from tessera.training.metrics.ne_with_recalibration import RecalibratedNEMetric
from tessera.training.metrics.nmse import NMSEMetric
from tessera.training.metrics.num_missing_labels import NumMissingLabelsMetric
from tessera.training.metrics.num_positive_samples import NumPositiveSamplesMetric
from tessera.training.metrics.output import OutputMetric
from tessera.training.metrics.precision import PrecisionMetric
from tessera.training.metrics.precision_session import PrecisionSessionMetric
from tessera.training.metrics.rauc import RAUCMetric
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.recall import RecallMetric
from tessera.training.metrics.recall_session import RecallSessionMetric
from tessera.training.metrics.scalar import ScalarMetric
from tessera.training.metrics.segmented_ne import SegmentedNEMetric
from tessera.training.metrics.serving_calibration import ServingCalibrationMetric
from tessera.training.metrics.serving_ne import ServingNEMetric
from tessera.training.metrics.sum_weights import SumWeightsMetric
from tessera.training.metrics.tensor_weighted_avg import TensorWeightedAvgMetric
from tessera.training.metrics.tower_qps import TowerQPSMetric
from tessera.training.metrics.unweighted_ne import UnweightedNEMetric
from tessera.training.metrics.weighted_avg import WeightedAvgMetric
from tessera.training.metrics.weighted_sum_predictions import WeightedSumPredictionsMetric
from tessera.training.metrics.xauc import XAUCMetric

REC_METRICS_MAPPING: dict[RecMetricEnumBase, type[RecMetric]] = {
    RecMetricEnum.NE: NEMetric,
    RecMetricEnum.CTR: CTRMetric,
    RecMetricEnum.CALIBRATION: CalibrationMetric,
    RecMetricEnum.AUC: AUCMetric,
    RecMetricEnum.AUPRC: AUPRCMetric,
    RecMetricEnum.MSE: MSEMetric,
    RecMetricEnum.MAE: MAEMetric,
    RecMetricEnum.WEIGHTED_AVG: WeightedAvgMetric,
    RecMetricEnum.ACCURACY: AccuracyMetric,
    RecMetricEnum.NDCG: NDCGMetric,
    RecMetricEnum.PRECISION: PrecisionMetric,
    RecMetricEnum.RECALL: RecallMetric,
    RecMetricEnum.NE_POSITIVE: NEPositiveMetric,
    RecMetricEnum.SEGMENTED_NE: SegmentedNEMetric,
    RecMetricEnum.CALI_FREE_NE: CaliFreeNEMetric,
    RecMetricEnum.UNWEIGHTED_NE: UnweightedNEMetric,
    RecMetricEnum.RECALIBRATED_NE: RecalibratedNEMetric,
    RecMetricEnum.RECALIBRATED_CALIBRATION: RecalibratedCalibrationMetric,
    RecMetricEnum.SERVING_NE: ServingNEMetric,
    RecMetricEnum.SERVING_CALIBRATION: ServingCalibrationMetric,
    RecMetricEnum.RAUC: RAUCMetric,
    RecMetricEnum.XAUC: XAUCMetric,
    RecMetricEnum.RECALL_SESSION_LEVEL: RecallSessionMetric,
    RecMetricEnum.PRECISION_SESSION_LEVEL: PrecisionSessionMetric,
    RecMetricEnum.MULTICLASS_RECALL: MulticlassRecallMetric,
    RecMetricEnum.MULTI_LABEL_PRECISION: MultiLabelPrecisionMetric,
    RecMetricEnum.HINDSIGHT_TARGET_PR: HindsightTargetPRMetric,
    RecMetricEnum.NMSE: NMSEMetric,
    RecMetricEnum.AVERAGE: AverageMetric,
    RecMetricEnum.NUM_POSITIVE_SAMPLES: NumPositiveSamplesMetric,
    RecMetricEnum.NUM_MISSING_LABELS: NumMissingLabelsMetric,
    RecMetricEnum.SUM_WEIGHTS: SumWeightsMetric,
    RecMetricEnum.WEIGHTED_SUM_PREDICTIONS: WeightedSumPredictionsMetric,
    RecMetricEnum.TENSOR_WEIGHTED_AVG: TensorWeightedAvgMetric,
    RecMetricEnum.TOWER_QPS: TowerQPSMetric,
    RecMetricEnum.SCALAR: ScalarMetric,
    RecMetricEnum.OUTPUT: OutputMetric,
}
"""The class of each metric; a program may add its own under an enumeration of its own."""
