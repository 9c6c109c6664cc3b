"""Word lists: stop words, words that ask, abbreviations whose full stop ends no sentence."""

from typing import Final

STOP_WORDS: Final[tuple[str, ...]] = tuple(
    """
    a about above after again against all also am an and any are aren as at be because been
    before being below between both but by can cannot could couldn d did didn do does doesn
    doing don down during each either else ever every few for from further had hadn has hasn
    have haven having he her here hers herself him himself his how however i if in into is isn
    it its itself just ll m many may me might more most much must my myself neither no nor not
    now o of off often on once one only onto or other our ours ourselves out over own per quite
    rather re s same shall she should shouldn since so some such t than that the their theirs
    them themselves then there these they thi this those though through thu thus to too under
    until up upon us ve very via wa was wasn we were weren what when where whether which while
    who whom whose why will with within without won would wouldn yet you your yours yourself
    el la los las un una unos unas de del que y en es se por con para su al lo como mas pero sus
    le ya este esta son cual cuando donde quien fue muy les des et est une dans qui pour pas sur
    au aux ce cette il elle ils sont avec ne plus par quel quelle ou der die das und ist ein
    eine einen einem einer dem den im nicht mit auf fur von zu sich auch wird bei wie aus nach
    was welche welcher wann wer wo o os do da em um uma com nao mais ao dos della gli che di il
    per non sono come anche del nel alla
    и в во не что он на я с со как а то все она так его но да ты к у же вы за бы по из о это
    или от при для был была были какой какая какие кто где когда чем об их
    في من على إلى عن أن هذا هذه التي الذي ما هو هي كان كانت مع و أو متى أين كم
    है हैं का की के में से को और यह वह पर ने भी था थी थे किस कौन क्या कब कहाँ एक
    """.split()
)
ASKING_WORDS: Final[tuple[str, ...]] = tuple(
    """
    according additional answer answers article articles article ask asked asking base based brief
    briefly cite compare concise context contexts describe detail details discuss document
    documents doc docs elaborate excerpt excerpts explain explained expand following follow
    give given go ahead help information key list main me mention mentioned need ok okay outline
    paragraph passage passages please point points provide provided question questions quote read
    refer relevant reply respond response say says section sentence sentences source sources state
    step steps summarise summarize summary tell text texts thank thanks think translate understand
    use using want word words write yes
    """.split()
)
ABBREVIATIONS: Final[tuple[str, ...]] = tuple(
    """
    mr mrs ms dr prof sr jr st vs etc eg ie cf al fig figs eq eqs vol pp approx dept inc ltd co
    corp gen sgt capt lt rev hon jan feb apr jun jul aug sep sept oct nov dec nr bzw usw ca sra
    dra ul им ул гг рис см др
    """.split()
)
