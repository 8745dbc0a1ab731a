SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE public.agreement (
    project character varying NOT NULL,
    verifier character varying NOT NULL,
    version character varying NOT NULL,
    measured_at timestamp with time zone NOT NULL,
    body json NOT NULL
);
CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.api_key (
    id character varying NOT NULL,
    sha256 character varying NOT NULL,
    project character varying NOT NULL,
    scopes character varying NOT NULL,
    made_at timestamp with time zone NOT NULL,
    max_calls bigint,
    max_tokens bigint,
    max_usd double precision,
    n_calls bigint NOT NULL,
    n_tokens bigint NOT NULL,
    cost_usd double precision NOT NULL,
    max_calls_per_minute bigint
);
CREATE TABLE public.body (
    key bigint NOT NULL,
    hash bytea NOT NULL,
    data bytea NOT NULL
);
CREATE SEQUENCE public.body_key_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.body_key_seq OWNED BY public.body.key;
CREATE TABLE public.body_text (
    body_key bigint NOT NULL,
    words tsvector NOT NULL
);
CREATE TABLE public.decision (
    project character varying NOT NULL,
    candidate integer NOT NULL,
    body json NOT NULL
);
CREATE TABLE public.eval_report (
    project character varying NOT NULL,
    suite_hash character varying NOT NULL,
    policy_version integer NOT NULL,
    body json NOT NULL
);
CREATE TABLE public.facet (
    trace_key bigint NOT NULL,
    name character varying NOT NULL,
    value character varying NOT NULL
);
CREATE TABLE public.label (
    trace_key bigint NOT NULL,
    detector character varying NOT NULL,
    type character varying NOT NULL,
    step integer NOT NULL,
    evidence character varying NOT NULL,
    confidence double precision NOT NULL,
    critical boolean NOT NULL,
    given_at timestamp with time zone NOT NULL
);
CREATE TABLE public.lease (
    project character varying NOT NULL,
    owner character varying NOT NULL,
    ends_at timestamp with time zone NOT NULL
);
CREATE TABLE public.policy_version (
    project character varying NOT NULL,
    number integer NOT NULL,
    parent integer,
    kind character varying NOT NULL,
    artifact character varying,
    sha256 character varying NOT NULL,
    config_hash character varying NOT NULL,
    state character varying NOT NULL,
    note character varying NOT NULL,
    created_at timestamp with time zone NOT NULL
);
CREATE TABLE public.score (
    trace_key bigint NOT NULL,
    verifier character varying NOT NULL,
    source character varying NOT NULL,
    version character varying NOT NULL,
    value double precision,
    error character varying,
    given_at timestamp with time zone NOT NULL
);
CREATE TABLE public.setting (
    name character varying NOT NULL,
    value bytea NOT NULL
);
CREATE TABLE public.span (
    trace_key bigint NOT NULL,
    span_id character varying NOT NULL,
    parent_id character varying,
    name character varying NOT NULL,
    kind character varying NOT NULL,
    start_ns bigint NOT NULL,
    end_ns bigint NOT NULL,
    error character varying,
    session character varying,
    agent character varying,
    model character varying,
    tool character varying,
    n_prompt_tokens bigint NOT NULL,
    n_completion_tokens bigint NOT NULL,
    cost_usd double precision,
    episode_id character varying,
    task_id character varying,
    policy_version integer,
    reward double precision,
    response_id character varying,
    head bytea NOT NULL,
    bodies bytea NOT NULL
);
CREATE TABLE public.stage (
    project character varying NOT NULL,
    name character varying NOT NULL,
    "position" integer NOT NULL,
    n_episodes integer NOT NULL,
    n_tool_calls integer NOT NULL,
    wall_s double precision NOT NULL,
    cpu_s double precision NOT NULL,
    dropped json NOT NULL,
    metrics json NOT NULL
);
CREATE TABLE public.trace (
    key bigint NOT NULL,
    project character varying NOT NULL,
    id character varying NOT NULL,
    source character varying NOT NULL,
    source_id character varying,
    name character varying,
    session character varying,
    agent character varying,
    model character varying,
    episode_id character varying,
    stage character varying,
    n integer,
    task_id character varying,
    pool character varying,
    split character varying,
    purpose character varying,
    "group" character varying,
    policy_version integer,
    seed bigint,
    episode_state character varying,
    stop_reason character varying,
    reward_state character varying NOT NULL,
    reward double precision,
    failure character varying,
    n_steps integer NOT NULL,
    n_tool_calls integer NOT NULL,
    n_spans integer NOT NULL,
    n_errors integer NOT NULL,
    n_prompt_tokens bigint NOT NULL,
    n_completion_tokens bigint NOT NULL,
    cost_usd double precision,
    answer character varying,
    error character varying,
    started_at timestamp with time zone,
    duration_s double precision NOT NULL,
    stored_at timestamp with time zone NOT NULL,
    body bytea,
    bodies bytea
);
CREATE TABLE public.trace_body (
    trace_key bigint NOT NULL,
    body_key bigint NOT NULL
);
CREATE SEQUENCE public.trace_key_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.trace_key_seq OWNED BY public.trace.key;
CREATE TABLE public.verdict (
    key bigint NOT NULL,
    trace_key bigint NOT NULL,
    given_at timestamp with time zone NOT NULL,
    by character varying NOT NULL,
    why character varying NOT NULL,
    state character varying NOT NULL,
    reward double precision,
    stamp character varying,
    body bytea NOT NULL
);
CREATE SEQUENCE public.verdict_key_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.verdict_key_seq OWNED BY public.verdict.key;
ALTER TABLE ONLY public.body ALTER COLUMN key SET DEFAULT nextval('public.body_key_seq'::regclass);
ALTER TABLE ONLY public.trace ALTER COLUMN key SET DEFAULT nextval('public.trace_key_seq'::regclass);
ALTER TABLE ONLY public.verdict ALTER COLUMN key SET DEFAULT nextval('public.verdict_key_seq'::regclass);
INSERT INTO public.alembic_version VALUES ('0004');
INSERT INTO public.body VALUES (1, '\x10e5a420bb5652cdd29c3bb57dfbb219', '\x007b22726f6c65223a2275736572222c22636f6e74656e74223a22486f77206d7563683f222c22726561736f6e696e67223a22222c22746f6f6c5f63616c6c73223a5b5d2c22746f6f6c5f63616c6c5f6964223a6e756c6c2c226e616d65223a6e756c6c2c22746f6b656e5f696473223a5b5d7d');
INSERT INTO public.body VALUES (2, '\x9a606f437c17be6031275983b13407a8', '\x007b2263616c6c5f6964223a2263616c6c5f30222c226e616d65223a227368656c6c222c22636f6e74656e74223a226c696e6520315c6e6c696e652032222c226f6b223a747275652c22657869745f636f6465223a302c2274696d65645f6f7574223a66616c73652c226475726174696f6e5f73223a302e307d');
INSERT INTO public.body VALUES (3, '\xb939b8449327c112db8bdf40405f74ea', '\x007b22726f6c65223a22617373697374616e74222c22636f6e74656e74223a22615c6e62222c22726561736f6e696e67223a22222c22746f6f6c5f63616c6c73223a5b7b226964223a2263616c6c5f30222c226e616d65223a227368656c6c222c22617267756d656e7473223a227b5c22636f6d6d616e645c223a205c226361742066315c227d222c226572726f72223a6e756c6c7d5d2c22746f6f6c5f63616c6c5f6964223a6e756c6c2c226e616d65223a6e756c6c2c22746f6b656e5f696473223a5b312c325d7d');
INSERT INTO public.body VALUES (4, '\x57464322d056e5dd2d2c2d5750d46151', '\x007b2263616c6c5f6964223a2263616c6c5f30222c226e616d65223a227368656c6c222c22636f6e74656e74223a226c696e6520315c6e6c696e652032222c226f6b223a747275652c22657869745f636f6465223a302c2274696d65645f6f7574223a66616c73652c226475726174696f6e5f73223a302e307d');
INSERT INTO public.body VALUES (5, '\xd0074bf32e249e69b61211781e9e11fa', '\x007b22726f6c65223a22617373697374616e74222c22636f6e74656e74223a22615c6e62222c22726561736f6e696e67223a22222c22746f6f6c5f63616c6c73223a5b7b226964223a2263616c6c5f30222c226e616d65223a227368656c6c222c22617267756d656e7473223a227b5c22636f6d6d616e645c223a205c226361742066315c227d222c226572726f72223a6e756c6c7d5d2c22746f6f6c5f63616c6c5f6964223a6e756c6c2c226e616d65223a6e756c6c2c22746f6b656e5f696473223a5b312c325d7d');
INSERT INTO public.body VALUES (6, '\xfa90424e25fb46f4e77d25f607dddec8', '\x007b22726f6c65223a2275736572222c22636f6e74656e74223a22486f77206d7563683f222c22726561736f6e696e67223a22222c22746f6f6c5f63616c6c73223a5b5d2c22746f6f6c5f63616c6c5f6964223a6e756c6c2c226e616d65223a6e756c6c2c22746f6b656e5f696473223a5b5d7d');
INSERT INTO public.body_text VALUES (1, '''how'':1 ''much'':2');
INSERT INTO public.body_text VALUES (2, '''0'':2 ''1'':5 ''2'':7 ''call'':1 ''line'':4,6 ''shell'':3');
INSERT INTO public.body_text VALUES (3, '''0'':4 ''a'':1 ''b'':2 ''call'':3 ''cat'':7 ''command'':6 ''f1'':8 ''shell'':5');
INSERT INTO public.body_text VALUES (4, '''0'':2 ''1'':5 ''2'':7 ''call'':1 ''line'':4,6 ''shell'':3');
INSERT INTO public.body_text VALUES (5, '''0'':4 ''a'':1 ''b'':2 ''call'':3 ''cat'':7 ''command'':6 ''f1'':8 ''shell'':5');
INSERT INTO public.body_text VALUES (6, '''how'':1 ''much'':2');
INSERT INTO public.facet VALUES (1, 'tool', 'shell');
INSERT INTO public.facet VALUES (2, 'tool', 'shell');
INSERT INTO public.facet VALUES (3, 'tool', 'shell');
INSERT INTO public.facet VALUES (4, 'tool', 'shell');
INSERT INTO public.facet VALUES (5, 'agent', 'helper');
INSERT INTO public.facet VALUES (6, 'tool', 'shell');
INSERT INTO public.facet VALUES (7, 'tool', 'shell');
INSERT INTO public.facet VALUES (8, 'tool', 'shell');
INSERT INTO public.facet VALUES (9, 'tool', 'shell');
INSERT INTO public.label VALUES (2, 'rules.misread@1', 'obs.misread', 0, 'line 1', 1, true, '2026-11-22 16:51:34.950569+00');
INSERT INTO public.label VALUES (7, 'rules.misread@1', 'obs.misread', 0, 'line 1', 1, true, '2026-11-22 16:51:35.203301+00');
INSERT INTO public.policy_version VALUES ('default', 1, NULL, 'weights', NULL, 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc', 'candidate', '', '2026-11-21 09:30:00.123456+00');
INSERT INTO public.policy_version VALUES ('ann', 1, NULL, 'weights', NULL, 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc', 'candidate', '', '2026-11-21 09:30:00.123456+00');
INSERT INTO public.score VALUES (1, 'exact', 'judge', '1', 1, NULL, '2026-11-22 16:51:34.950569+00');
INSERT INTO public.score VALUES (2, 'exact', 'judge', '1', 0, NULL, '2026-11-22 16:51:34.950569+00');
INSERT INTO public.score VALUES (3, 'exact', 'judge', '1', NULL, NULL, '2026-11-22 16:51:34.950569+00');
INSERT INTO public.score VALUES (4, 'exact', 'judge', '1', 1, NULL, '2026-11-22 16:51:34.966283+00');
INSERT INTO public.score VALUES (6, 'exact', 'judge', '1', 1, NULL, '2026-11-22 16:51:35.203301+00');
INSERT INTO public.score VALUES (7, 'exact', 'judge', '1', 0, NULL, '2026-11-22 16:51:35.203301+00');
INSERT INTO public.score VALUES (8, 'exact', 'judge', '1', NULL, NULL, '2026-11-22 16:51:35.203301+00');
INSERT INTO public.score VALUES (9, 'exact', 'judge', '1', 1, NULL, '2026-11-22 16:51:35.220255+00');
INSERT INTO public.setting VALUES ('hash_key', '\x436d0758fc8a27149a9754915c9dc74176d4b60815aabf79d581ccbf12d91bad');
INSERT INTO public.span VALUES (5, '0000000000000001', NULL, 'agent 1', 'agent', 1795253401000000000, 1795253401500000000, NULL, 's1', 'helper', NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, '\x0128b52ffd2028e5000090207b226e223a20317d2c2073223a205b5d7d0200a48b709ab20802', '\x');
INSERT INTO public.stage VALUES ('default', 'turn-1', 1, 3, 0, 0, 0, '{}', '{}');
INSERT INTO public.stage VALUES ('ann', 'turn-1', 1, 3, 0, 0, 0, '{}', '{}');
INSERT INTO public.trace VALUES (2, 'default', 't2', 'agentloop', NULL, NULL, NULL, NULL, NULL, 'e-t2', 'turn-1', 1, 'sum-f1', 'sum', 'train', 'train', 'g/0', 1, 140737488355328, 'finished', 'submitted', 'scored', 0, 'obs.misread', 1, 1, 0, 0, 0, 0, NULL, '12
 µ � \n', NULL, '2026-11-21 09:30:00.123456+00', 0.25, '2026-11-22 16:51:34.930079+00', '\x78018d544b6edb3010ddf71406d77220c94d806ad32e7b80ae5a05022d8d6d221429f0133b300cf438bd402fd0a3f4247d43c68ab2081a6f0c0d876fde9b799cb350836844a845216852de0ed4a508ad532c48ff90033e8eeb5d85b4c96ad53f758fe4bcb2463455010c32418527d198a875214ca7ad0fa22971e4ad9621250a2347f293ecc903c6dbe87a426db9c7656ded340753c18ce4c9e72af933e55eab00cc23e045f3e32c9cd50c163d39e0f4d604a022f0d51e5763ec0f9f117524bd35caec11c767b05677bdd49a11ee17df8bfa4cf95a2fd80732384be9175cf081a65c5d99814e49ef81a4434719afb7e3a4296b3f8b67b6a299b94a48f34182e692b06ccdf63f5ccf79684cbd2b919b490a7f20adf129dd3e8e500f6ae2dc328d519aa115cd0a1f32ac76552b2ec823e7accbe258cddc8e77c8af8afafe52889d32ca1fbadc5754f3214d7172501eba65bf3628a0ed1e275beed8babca98a7545eb4d59e26484edf4b5cda65bde47365c6430a7fe4043c69c63738397f11ed6eba2c710d83360e9c847cddd804d52cf92c1dfeade8b75b432b4aa5a93fef981d807d1041709ad3ba9d0f5609dd80535829a8df0db4e6a8ff321ba64fa8ea9de94d92cd205a449646533bf4ec23362c3c81e49334e2273c28deca7492dce785e2cea9ed1fb83d283233c47ce94c61ff10e1a51d5adf9fbf3d7eacfef551b4bfc566d6ba08407b5185bdc8e2a70dd57a628c4d6c1f257ba98cadec971e6968b788619e4965fdfb378787a562aeab2be5b57d5baaebe959f9a4dd994187dbdf9787bf71dd55eb7a0bebd7c388be0b0219207f35a025c00b8f0bd7589a2a3637a63682c947034cf161b49ed54d24d27f411f8f39212bcb91ea58e3c31beb7307f218e07ac2e5e096f78ef1d3e7b5968c97518c24e2a1dafdcc2d3c41ae0fe9b51796e19aaf1fe4806a247dea0691b66d3e170a0407de0072a5cd434dffbc24ae08bddf54ac5727aa78282a5b341d37396276bec38ef6406797e12ff00024affbe', NULL);
INSERT INTO public.trace VALUES (3, 'default', 't3', 'agentloop', NULL, NULL, NULL, NULL, NULL, 'e-t3', 'turn-1', 2, 'sum-f1', 'sum', 'train', 'train', 'g/0', 1, 140737488355328, 'infra_failed', 'submitted', 'infra_failed', NULL, NULL, 1, 1, 0, 0, 0, 0, NULL, '12
 µ � \n', 'SandboxGone: it died', '2026-11-21 09:32:00.123456+00', 0.25, '2026-11-22 16:51:34.930307+00', '\x78018d544b6edb3010ddf714c2aca540929b00d5a6cb76dfae5a05022d5116118a14f8891d18067a9c5ea017e8517a923e92b1a22e82c61b83c3d19b376f1ee74c62a086dc8e72e28bb07ae05d8cf022c61cb30f2960fd5c8c15d2162d45ffd43d72638556d4543930b872c23d51a3bc9439a94e6aeba8297165b5642e26926233b70bebb9058cd5def41cb5d9011f4bad9735180b2624cb6daa928e31f75a056016014bcdf733192d0398b7dc00a7d7ca011581cffa98cdbe9f3e226a38b35a0975401c47a7b5ec7a266540b8df9c37f503e56b3da71fb8c25d4cbfe003ebf892aa0b35f053ec77e2cc40d180d7eb79913cf57ea667b6d4ac5c195ab38e81e696306bd5fe3f5ccf6968817a57223791243b71297164e6e067740f6a746e038d99a9a1a526c381b96cac5aba208f1ba34d6a2e74b3caf186f6abbcbebfe4340a25ecd4255d51cdba38c5c5a073d76df5daa180d407dcec8362457953e545c58b5d59e26686ede45566d56dbf47365ca430a77ee243c25c63abc0db780feb75de6208c1336069b8f532a8019b44cda2c15f53efc53a52289e55ad8aff3504d30fd438e339a43b09d7f5601dd93931839af6f0dbc8a4c5fde04d347d17a8de94c92ccc38a431642533ff9b8467140cc37a24ad3891cc095f243f2d627317e6159aba0fe8fd24e460389e63c864ca1ef10e1aaaea56fdf9f133fbfd2b6b7d895fd6b60a9d84416dc6e6f7b370a1ee6a0afa02cbecf5e99356bcc984cb86503aa7bdc123b83680391d0c9b57b6a9ac0dc003db87f7f82c075cbef64e7559df155555d4d5d7f243b3ab9b1266a877ef6fefbea1c0bfa2d4b797776772063b23ba322d2ac039809350a361ddc8848cdc0c3fc6b7f7bc397a8dc1c7a1635589514441f80902a3ccbabd28acb44726fddad5e659e4749cb0d4c2b278c5956f70e0cbaa8b7ec47802639fc8e1e4d8492b3dafcbd3f8a05cccfd0ba704e4b9', NULL);
INSERT INTO public.trace VALUES (4, 'default', 't4', 'agentloop', NULL, NULL, NULL, NULL, NULL, 'e-t4', 'gate-v1.5f', 0, 'sum-f1', 'sum', 'train', 'train', 'g/0', 1, 140737488355328, 'finished', 'submitted', 'scored', 1, NULL, 1, 1, 0, 0, 0, 0, NULL, '12
 µ � \n', NULL, '2026-11-21 09:30:00.123456+00', 0.25, '2026-11-22 16:51:34.953876+00', '\x78018d544b6edb3010ddf714c2aca540929300d5a6db1ea0ab5686404bb4459822057e620786811ea717e8057a949ea48f64ac288ba0f1c6e070f8e6cd9ba7b99018a821774f39f159583df02e467811638ed9630a583f15fb0a69b396a27fee9eb8b1422b6aaa1c185c39e19ea9515eca9c5427b575d494b8b25a32171349b189db99f5dc02c66a6f7a8edaec80c752eb7909c68209c9729baaa463ccbd55019845c052f3e34246cb00e62d37c0e9b5724045e0ab3e6593efc72f881aceac56421d10c7d1692dbb9e491910b6abf3aa7ea07cabe7f4912bdcc5f42b1e58c7e7545da8819f63bf2367068a06bc5e4fb3e4a9f70bbdb0a566e1cad09a750c34d78459ab76ffe17a49430bd4bb12b98924d9914b892333073fa17b50a34b1b684c4c0d2d35190ecc65fbaaa52bf2b831daa4e642378b1c1f68bfcaebed35a7bd50c28e5dd215d5ac8b539c0d3a77dd5aaf0d0a487dc0cd2e28569477555e54bcd894256e26d84ede6456ddfa3db2e1228539f5231f12e6125b045ec77b58aff31643089e014bc3ad97410dd8246a160dfe9e7aafd69142f1ac6a55fcaf21983e52e38ce790ee2c5cd7837564e7c4046adac36f7b262dee076fa2e9bb40f5ae4c6661c6218d212b99f96d123ea36018d62369c18964ce7891fc348bd55d9857686a1bd0fb51c8c1707c8e2193297bc277d05055b7eaefcf5fd99fdf59eb4bfcb2b655e8240c6a3536bf9b840b75df9822a79d81e56f7431958361d3c22d15b1016660bbf0f5bd340f4f2f9d525dd68f45551575f5adfcdc6ccaa6c4e8ebcdfdc3e377547b2b41fd70fd742167b021a207d35a029c0338d95e9b48d1f053fcc6aa3b382346d36cb191c45ec4bef9193a027f59521436d713931e48f1ddcafc399d46acaeb012def1de077cf6bad0a2eb30843d13d2c37b69248e9db5d2d3b2228d0f8ac5dc7fde50da40', NULL);
INSERT INTO public.trace VALUES (1, 'default', 't1', 'agentloop', NULL, NULL, NULL, NULL, NULL, 'e-t1', 'turn-1', 0, 'sum-f1', 'sum', 'train', 'train', 'g/0', 1, 140737488355328, 'finished', 'submitted', 'scored', 0.25, NULL, 1, 1, 0, 0, 0, 0, NULL, '12
 µ � \n', NULL, '2026-11-21 09:30:00.123456+00', 0.25, '2026-11-22 16:51:34.92969+00', '\x78018d544b6edb3010ddf714c2ac2543929b00d5a6db1ea0ab5686404bb4458422057e620786811ea717e8057a949ea48f64ac288b20f1c6e070f4e6cd9bc7b99018a82157514e7c16560fbc8b115ec49863f62105ac9f8a43489bb514fd53f7c88d155a5153e5c0e0ca09f7448df252e6a43aa9ada3a6c495d592b998488a4ddcceace71630567bd373d466477c2cb59e97602c98902cb7a94a3ac6dc5b158059042c353f2f64b40c60de72039c5e2b075404bee95336f97efc8aa8e1cc6a25d411711c9dd6b2eb99940161b73aafea07cab77a4e3f7085bb987ec507d6f13955176ae0e7d8efc89981a201afd7d32c79eafd42cf6ca959b832b4661d03cd3561d6aafd3b5c2f6968817a57223791243b72297164e6e827740f6a7469038d89a9a1a526c381b9ec50b574451e37469bd45ce86691e303ed5779bdbbe674104ad8b14bbaa29a75718ab341e7ae5bebb54501a98fb8d907c58a7253e545c58b6d59e26682ede44d66d5adbf47365ca430a77ee443c25c628bc0eb780feb75de6208c1336069b8f532a8019b44cda2c1df52efc53a52289e55ad8aff3504d30fd438e339a43b0bd7f5601dd93931819af6f0db81498bfbc19b68fa2e50dd94c92ccc38a431642533bf4ec2330a86613d92169c48e68c2f929f66b1ba0bf30a4ded027a3f0a39188ee7183299b227bc8386aaba55ff7efdcefefec95a5fe297b5ad42276150abb1f9fd245ca8fbca1439ed0d2c7fa38ba91c0d9b166ea9880d3003db87d7f7dc3c3cbd744a7559df175555d4d5f7f24bb32d9b12a3afb79fefee7fa0da6b09eabbeba70b39830d113d98d612e01cc0c9f6da448a869fe21b2b37f51d5a09e1345cac247110b1717e869028b06c290aabeb91490fa86a034baddc9fd369c4ee0a3be10df37dc0682f1b2dda0e533830217de286936367adf4b4ec48e3836431f73f7b88da6d', NULL);
INSERT INTO public.trace VALUES (5, 'p', '00000000000000000000000000000001', 'otlp', NULL, 'agent 1', 's1', 'helper', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'unscored', NULL, NULL, 0, 0, 1, 0, 0, 0, NULL, NULL, NULL, '2026-11-21 09:30:01+00', 0.5, '2026-11-22 16:51:35.127533+00', NULL, NULL);
INSERT INTO public.trace VALUES (6, 'ann', 't1', 'agentloop', NULL, NULL, NULL, NULL, NULL, 'e-t1', 'turn-1', 0, 'sum-f1', 'sum', 'train', 'train', 'g/0', 1, 140737488355328, 'finished', 'submitted', 'scored', 1, NULL, 1, 1, 0, 0, 0, 0, NULL, '12
 µ � \n', NULL, '2026-11-21 09:30:00.123456+00', 0.25, '2026-11-22 16:51:35.184364+00', '\x78018d544b6edb3010ddf714c2ac2543929b00d5a6db1ea0ab5681404bb4458422057e620786811ea717e8057a949ea48f64acc88b20f1c6e070f8e6cd9ba7399318a82157514e7c16560fbc8b115ec49863f63105ac9f8a7d489bb514fd73f7c48d155a5153e5c0e0ca09f74c8df252e6a43aa9ada3a6c495d592b998488a4ddcceace71630567bd373d466073c965acf4b30164c4896db54251d63eeb50ac02c02969a9f67325a06306fb9014eaf95032a02dff4319b7c3f7e45d47066b512ea80388e4e6bd9f54cca80f0b03aafea07cad77a4e3f7285bb987ec103ebf89caa0b35f053ec77e4cc40d180d7eb69963cf57ea617b6d42c5c195ab38e81e69a306bd5ee1daee734b440bd2b919b48921db994383273f013ba07353ab781c6c4d4d05293e1c05cb6af5aba208f1ba34d6a2e74b3c8f181f6abbc7eb8e4b4174ad8b14bbaa29a75718ab341e7ae5bebb54501a90fb8d905c58a7253e545c58b6d59e26682ede45566d5addf231b2e5298533ff221612eb145e075bc87f53a6f3184e019b034dc7a19d4804da266d1e06fa9f76a1d2914cfaa56c5ff1a82e9476a9cf11cd29d84eb7ab08eec9c98404d7bf86dcfa4c5fde04d347d17a86eca6416661cd218b292996f93f01905c3b01e490b4e2473c28be4a759aceec2bc42530f01bd1f851c0cc7e7183299b2477c070d5575abfefdfa9dfdfd93b5bec42f6b5b854ec2a05663f3bb49b850f7c61439ed0c2c7fa58ba91c0c9b166ea9880d3003db85afefa579787ae994eab2be2faaaaa8abefe597665b3625465f6f3fdfddff40b55b09eabbcba73339830d113d98d612e01cc0c9f6da448a861fe337566de08c184db3c546127b11fbe627e808fc654951d85c4f4c7a20c5772bf3e7741cb1bac24a78c37b1ff0d9eb428baec310f64c480fefa5913876d24a4fcb8a343e281673ff03baf5da37', NULL);
INSERT INTO public.trace VALUES (7, 'ann', 't2', 'agentloop', NULL, NULL, NULL, NULL, NULL, 'e-t2', 'turn-1', 1, 'sum-f1', 'sum', 'train', 'train', 'g/0', 1, 140737488355328, 'finished', 'submitted', 'scored', 0, 'obs.misread', 1, 1, 0, 0, 0, 0, NULL, '12
 µ � \n', NULL, '2026-11-21 09:30:00.123456+00', 0.25, '2026-11-22 16:51:35.184855+00', '\x78018d544b6edb3010ddf71406d77220c94d806ad32e7b80ae5a05022d8d6d221429f0133b300cf438bd402fd0a3f4247d43c68ab2081a6f0c0d876fde9b799cb350836844a845216852de0ed4a508ad532c48ff90033e8eeb5d85b4c96ad53f758fe4bcb2463455010c32418527d198a875214ca7ad0fa22971e4ad9621250a2347f293ecc903c6dbe87a426db9c7656ded340753c18ce4c9e72af933e55eab00cc23e045f3e32c9cd50c163d39e0f4d604a022f0d51e5763ec0f9f117524bd35caec11c767b05677bdd49a11ee17df8bfa4cf95a2fd80732384be9175cf081a65c5d99814e49ef81a4434719afb7e3a4296b3f8b67b6a299b94a48f34182e692b06ccdf63f5ccf79684cbd2b919b490a7f20adf129dd3e8e500f6ae2dc328d519aa115cd0a1f32ac76552b2ec823e7accbe258cddc8e77c8af8afafe52889d32ca1fbadc5754f3214d7172501eba65bf3628a0ed1e275beed8babca98a7545eb4d59e26484edf4b5cda65bde47365c6430a7fe4043c69c63738397f11ed6eba2c710d83360e9c847cddd804d52cf92c1dfeade8b75b432b4aa5a93fef981d807d1041709ad3ba9d0f5609dd80535829a8df0db4e6a8ff321ba64fa8ea9de94d92cd205a449646533bf4ec23362c3c81e49334e2273c28deca7492dce785e2cea9ed1fb83d283233c47ce94c61ff10e1a51d5adf9fbf3d7eacfef551b4bfc566d6ba08407b5185bdc8e2a70dd57a628c4d6c1f257ba98cadec971e6968b788619e4965fdfb378787a562aeab2be5b57d5baaebe959f9a4dd994187dbdf9787bf71dd55eb7a0bebd7c388be0b0219207f35a025c00b8f0bd7589a2a3637a63682c947034cf161b49ed54d24d27f411f8f39212bcb91ea58e3c31beb7307f218e07ac2e5e096f78ef1d3e7b5968c97518c24e2a1dafdcc2d3c41ae0fe9b51796e19aaf1fe4806a247dea0691b66d3e170a0407de0072a5cd434dffbc24ae08bddf54ac5727aa78282a5b341d37396276bec38ef6406797e12ff00024affbe', NULL);
INSERT INTO public.trace VALUES (8, 'ann', 't3', 'agentloop', NULL, NULL, NULL, NULL, NULL, 'e-t3', 'turn-1', 2, 'sum-f1', 'sum', 'train', 'train', 'g/0', 1, 140737488355328, 'infra_failed', 'submitted', 'infra_failed', NULL, NULL, 1, 1, 0, 0, 0, 0, NULL, '12
 µ � \n', 'SandboxGone: it died', '2026-11-21 09:32:00.123456+00', 0.25, '2026-11-22 16:51:35.185103+00', '\x78018d544b6edb3010ddf714c2aca540929b00d5a6cb76dfae5a05022d5116118a14f8891d18067a9c5ea017e8517a923e92b1a22e82c61b83c3d19b376f1ee74c62a086dc8e72e28bb07ae05d8cf022c61cb30f2960fd5c8c15d2162d45ffd43d72638556d4543930b872c23d51a3bc9439a94e6aeba8297165b5642e26926233b70bebb9058cd5def41cb5d9011f4bad9735180b2624cb6daa928e31f75a056016014bcdf733192d0398b7dc00a7d7ca011581cffa98cdbe9f3e226a38b35a0975401c47a7b5ec7a266540b8df9c37f503e56b3da71fb8c25d4cbfe003ebf892aa0b35f053ec77e2cc40d180d7eb79913cf57ea667b6d4ac5c195ab38e81e696306bd5fe3f5ccf6968817a57223791243b71297164e6e067740f6a746e038d99a9a1a526c381b96cac5aba208f1ba34d6a2e74b3caf186f6abbcbebfe4340a25ecd4255d51cdba38c5c5a073d76df5daa180d407dcec8362457953e545c58b5d59e26686ede45566d56dbf47365ca430a77ee243c25c63abc0db780feb75de6208c1336069b8f532a8019b44cda2c15f53efc53a52289e55ad8aff3504d30fd438e339a43b09d7f5601dd93931839af6f0dbc8a4c5fde04d347d17a8de94c92ccc38a431642533ff9b8467140cc37a24ad3891cc095f243f2d627317e6159aba0fe8fd24e460389e63c864ca1ef10e1aaaea56fdf9f133fbfd2b6b7d895fd6b60a9d84416dc6e6f7b370a1ee6a0afa02cbecf5e99356bcc984cb86503aa7bdc123b83680391d0c9b57b6a9ac0dc003db87f7f82c075cbef64e7559df155555d4d5d7f243b3ab9b1266a877ef6fefbea1c0bfa2d4b797776772063b23ba322d2ac039809350a361ddc8848cdc0c3fc6b7f7bc397a8dc1c7a1635589514441f80902a3ccbabd28acb44726fddad5e659e4749cb0d4c2b278c5956f70e0cbaa8b7ec47802639fc8e1e4d8492b3dafcbd3f8a05cccfd0ba704e4b9', NULL);
INSERT INTO public.trace VALUES (9, 'ann', 't4', 'agentloop', NULL, NULL, NULL, NULL, NULL, 'e-t4', 'gate-v1.5f', 0, 'sum-f1', 'sum', 'train', 'train', 'g/0', 1, 140737488355328, 'finished', 'submitted', 'scored', 1, NULL, 1, 1, 0, 0, 0, 0, NULL, '12
 µ � \n', NULL, '2026-11-21 09:30:00.123456+00', 0.25, '2026-11-22 16:51:35.215075+00', '\x78018d544b6edb3010ddf714c2aca540929300d5a6db1ea0ab5686404bb4459822057e620786811ea717e8057a949ea48f64ac288ba0f1c6e070f8e6cd9ba7b99018a821774f39f159583df02e467811638ed9630a583f15fb0a69b396a27fee9eb8b1422b6aaa1c185c39e19ea9515eca9c5427b575d494b8b25a32171349b189db99f5dc02c66a6f7a8edaec80c752eb7909c68209c9729baaa463ccbd55019845c052f3e34246cb00e62d37c0e9b5724045e0ab3e6593efc72f881aceac56421d10c7d1692dbb9e491910b6abf3aa7ea07cabe7f4912bdcc5f42b1e58c7e7545da8819f63bf2367068a06bc5e4fb3e4a9f70bbdb0a566e1cad09a750c34d78459ab76ffe17a49430bd4bb12b98924d9914b892333073fa17b50a34b1b684c4c0d2d35190ecc65fbaaa52bf2b831daa4e642378b1c1f68bfcaebed35a7bd50c28e5dd215d5ac8b539c0d3a77dd5aaf0d0a487dc0cd2e28569477555e54bcd894256e26d84ede6456ddfa3db2e1228539f5231f12e6125b045ec77b58aff31643089e014bc3ad97410dd8246a160dfe9e7aafd69142f1ac6a55fcaf21983e52e38ce790ee2c5cd7837564e7c4046adac36f7b262dee076fa2e9bb40f5ae4c6661c6218d212b99f96d123ea36018d62369c18964ce7891fc348bd55d9857686a1bd0fb51c8c1707c8e2193297bc277d05055b7eaefcf5fd99fdf59eb4bfcb2b655e8240c6a3536bf9b840b75df9822a79d81e56f7431958361d3c22d15b1016660bbf0f5bd340f4f2f9d525dd68f45551575f5adfcdc6ccaa6c4e8ebcdfdc3e377547b2b41fd70fd742167b021a207d35a029c0338d95e9b48d1f053fcc6aa3b382346d36cb191c45ec4bef9193a027f59521436d713931e48f1ddcafc399d46acaeb012def1de077cf6bad0a2eb30843d13d2c37b69248e9db5d2d3b2228d0f8ac5dc7fde50da40', NULL);
INSERT INTO public.trace_body VALUES (1, 1);
INSERT INTO public.trace_body VALUES (1, 2);
INSERT INTO public.trace_body VALUES (1, 3);
INSERT INTO public.trace_body VALUES (2, 1);
INSERT INTO public.trace_body VALUES (2, 2);
INSERT INTO public.trace_body VALUES (2, 3);
INSERT INTO public.trace_body VALUES (3, 1);
INSERT INTO public.trace_body VALUES (3, 2);
INSERT INTO public.trace_body VALUES (3, 3);
INSERT INTO public.trace_body VALUES (4, 1);
INSERT INTO public.trace_body VALUES (4, 2);
INSERT INTO public.trace_body VALUES (4, 3);
INSERT INTO public.trace_body VALUES (6, 4);
INSERT INTO public.trace_body VALUES (6, 5);
INSERT INTO public.trace_body VALUES (6, 6);
INSERT INTO public.trace_body VALUES (7, 4);
INSERT INTO public.trace_body VALUES (7, 5);
INSERT INTO public.trace_body VALUES (7, 6);
INSERT INTO public.trace_body VALUES (8, 4);
INSERT INTO public.trace_body VALUES (8, 5);
INSERT INTO public.trace_body VALUES (8, 6);
INSERT INTO public.trace_body VALUES (9, 4);
INSERT INTO public.trace_body VALUES (9, 5);
INSERT INTO public.trace_body VALUES (9, 6);
INSERT INTO public.verdict VALUES (1, 1, '2026-11-22 16:51:34.950569+00', 'judge', '', 'scored', 1, NULL, '\x78014d8ed10a83300c45ff25cf32e6abbf32462935b2b2da489aaa43f6efbb9d0cf6784f4e6e7290a90fece24803594f1d15f3c6082588f208a0bc79c5b8bf5c316db4d0703b68658d536485cbbb0f0615a844c920ad69f5a9a2e9bbc7aa0233d7943ada1e2f2830b25b54e6c59cc993336a7121bb0094d850f4cf831473b5e091b3a448d580fa96def78e261f533d7f4332bf4b9619774e5b6bfab91fe25d51e1');
INSERT INTO public.verdict VALUES (2, 2, '2026-11-22 16:51:34.950569+00', 'judge', '', 'scored', 0, NULL, '\x78014d50cb6ec34008fc958ab315253dfad4ffa82a6b8bb18aba5e2c60f350947f2f244dd523c3cc30c3155c0bd2c4338ce0af308079718ac15094e600944e4563bddfed639ba8c1f87e8523292f4c1a5c3a17f4a006642c2d90434ea5f670baeb485582d97aad039cbe2e4109469b369575f3c9e59b5ad8c685366140953c8cfee328e653b708f23031e98a619fd3ed6380a570edcf6c7ed9b2837cda6e65532a59c49cb6fb093af24c2dc550b9d14b869dc9093d3382f64a7fbab75ca2b4e52939e41b50d9194b85d1b5539ef77296266b147bc44b93df703fec637766');
INSERT INTO public.verdict VALUES (3, 3, '2026-11-22 16:51:34.950569+00', 'judge', '', 'infra_failed', NULL, NULL, '\x78014d8ec10ac2400c44ff25e71e146ffd1591256c535cdc6e4a366b2be2bf3ba58a1ee7f1329927b971949006eac94fd4517576414865340e23a72c03b0c9c206a9b49c214535a9d49f9f74174b6312c389ac1c1d2e504d5a408e5be2dc50b81f8a9942ddc3727dc08152c26c3acd1e5c6f52d07bd85804cae268fae751ab87567f53b459fcf4bf2e1d6d8bdb3e0ec979d5a213feec2fade5affb06dc8d568f');
INSERT INTO public.verdict VALUES (4, 4, '2026-11-22 16:51:34.966283+00', 'judge', '', 'scored', 1, NULL, '\x78014d8ed10ac2300c45ff25cf431cf8b45f1129a5cbb0d835234ddd64f8efde59041fefc9c94d7632f5815d1c6920bb5047c5bc314209a23c0228af5e31ee4f674c0f5a68b8eef4648d536485cb9b0f0615a844c920fd917caa68faeeb1aac0cc35a58ed6fb0b0a8cec1695793167f2e08c5a5cc82e00253614fdf320c55c2d78a49514a91a507fa4f7ada3c9c754db6f48e637c932e34eb3b5a69ffb01e50c51e4');
INSERT INTO public.verdict VALUES (5, 1, '2026-11-22 16:51:35.081332+00', 'ann', '', 'scored', 0.25, NULL, '\x78014d8ed10a83300c45ff25cf3274b0177f658c526a6465b591345587ecdf7745067bccc9e1243b99fac02e0ed49375d450316f8ca104511e009457af58b797eb0deb0317eaef3b2dac718cac9079f3c1e002952819e4482d3e55a4ba4bdb10ab0acc5c536a687dbea1c0c86e56996673262fcec8c2cc2e00253684fe799062ae167c72468a540dc81fd3e7d1d0e863aae76f98cc6f9265c29dd3d69a7eee171a9a5217');
INSERT INTO public.verdict VALUES (6, 6, '2026-11-22 16:51:35.203301+00', 'judge', '', 'scored', 1, NULL, '\x78014d8ed10a83300c45ff25cf32e6abbf32462935b2b2da489aaa43f6efbb9d0cf6784f4e6e7290a90fece24803594f1d15f3c6082588f208a0bc79c5b8bf5c316db4d0703b68658d536485cbbb0f0615a844c920ad69f5a9a2e9bbc7aa0233d7943ada1e2f2830b25b54e6c59cc993336a7121bb0094d850f4cf831473b5e091b3a448d580fa96def78e261f533d7f4332bf4b9619774e5b6bfab91fe25d51e1');
INSERT INTO public.verdict VALUES (7, 7, '2026-11-22 16:51:35.203301+00', 'judge', '', 'scored', 0, NULL, '\x78014d50cb6ec34008fc958ab315253dfad4ffa82a6b8bb18aba5e2c60f350947f2f244dd523c3cc30c3155c0bd2c4338ce0af308079718ac15094e600944e4563bddfed639ba8c1f87e8523292f4c1a5c3a17f4a006642c2d90434ea5f670baeb485582d97aad039cbe2e4109469b369575f3c9e59b5ad8c685366140953c8cfee328e653b708f23031e98a619fd3ed6380a570edcf6c7ed9b2837cda6e65532a59c49cb6fb093af24c2dc550b9d14b869dc9093d3382f64a7fbab75ca2b4e52939e41b50d9194b85d1b5539ef77296266b147bc44b93df703fec637766');
INSERT INTO public.verdict VALUES (8, 8, '2026-11-22 16:51:35.203301+00', 'judge', '', 'infra_failed', NULL, NULL, '\x78014d8ec10ac2400c44ff25e71e146ffd1591256c535cdc6e4a366b2be2bf3ba58a1ee7f1329927b971949006eac94fd4517576414865340e23a72c03b0c9c206a9b49c214535a9d49f9f74174b6312c389ac1c1d2e504d5a408e5be2dc50b81f8a9942ddc3727dc08152c26c3acd1e5c6f52d07bd85804cae268fae751ab87567f53b459fcf4bf2e1d6d8bdb3e0ec979d5a213feec2fade5affb06dc8d568f');
INSERT INTO public.verdict VALUES (9, 9, '2026-11-22 16:51:35.220255+00', 'judge', '', 'scored', 1, NULL, '\x78014d8ed10ac2300c45ff25cf431cf8b45f1129a5cbb0d835234ddd64f8efde59041fefc9c94d7632f5815d1c6920bb5047c5bc314209a23c0228af5e31ee4f674c0f5a68b8eef4648d536485cb9b0f0615a844c920fd917caa68faeeb1aac0cc35a58ed6fb0b0a8cec1695793167f2e08c5a5cc82e00253614fdf320c55c2d78a49514a91a507fa4f7ada3c9c754db6f48e637c932e34eb3b5a69ffb01e50c51e4');
SELECT pg_catalog.setval('public.body_key_seq', 6, true);
SELECT pg_catalog.setval('public.trace_key_seq', 9, true);
SELECT pg_catalog.setval('public.verdict_key_seq', 9, true);
ALTER TABLE ONLY public.agreement
    ADD CONSTRAINT agreement_pkey PRIMARY KEY (project, verifier, version);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.api_key
    ADD CONSTRAINT api_key_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.body
    ADD CONSTRAINT body_hash_key UNIQUE (hash);
ALTER TABLE ONLY public.body
    ADD CONSTRAINT body_pkey PRIMARY KEY (key);
ALTER TABLE ONLY public.decision
    ADD CONSTRAINT decision_pkey1 PRIMARY KEY (project, candidate);
ALTER TABLE ONLY public.eval_report
    ADD CONSTRAINT eval_report_pkey1 PRIMARY KEY (project, suite_hash, policy_version);
ALTER TABLE ONLY public.facet
    ADD CONSTRAINT facet_pkey PRIMARY KEY (trace_key, name, value);
ALTER TABLE ONLY public.label
    ADD CONSTRAINT label_pkey PRIMARY KEY (trace_key, detector, type, step);
ALTER TABLE ONLY public.lease
    ADD CONSTRAINT lease_pkey PRIMARY KEY (project);
ALTER TABLE ONLY public.policy_version
    ADD CONSTRAINT policy_version_pkey1 PRIMARY KEY (project, number);
ALTER TABLE ONLY public.score
    ADD CONSTRAINT score_pkey PRIMARY KEY (trace_key, verifier, source);
ALTER TABLE ONLY public.setting
    ADD CONSTRAINT setting_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.span
    ADD CONSTRAINT span_pkey PRIMARY KEY (trace_key, span_id);
ALTER TABLE ONLY public.stage
    ADD CONSTRAINT stage_pkey1 PRIMARY KEY (project, name);
ALTER TABLE ONLY public.trace_body
    ADD CONSTRAINT trace_body_pkey PRIMARY KEY (trace_key, body_key);
ALTER TABLE ONLY public.trace
    ADD CONSTRAINT trace_pkey1 PRIMARY KEY (key);
ALTER TABLE ONLY public.trace
    ADD CONSTRAINT trace_project_id_key UNIQUE (project, id);
ALTER TABLE ONLY public.verdict
    ADD CONSTRAINT verdict_pkey PRIMARY KEY (key);
CREATE INDEX body_text_by_body ON public.body_text USING btree (body_key);
CREATE INDEX body_text_words ON public.body_text USING gin (words);
CREATE INDEX facet_by_value ON public.facet USING btree (name, value, trace_key);
CREATE INDEX ix_trace_policy_version ON public.trace USING btree (policy_version);
CREATE INDEX ix_trace_task_id ON public.trace USING btree (task_id);
CREATE INDEX label_by_type ON public.label USING btree (type, trace_key);
CREATE INDEX score_by_verifier ON public.score USING btree (verifier, value, trace_key);
CREATE INDEX span_by_response ON public.span USING btree (trace_key, response_id) WHERE (response_id IS NOT NULL);
CREATE INDEX span_by_time ON public.span USING btree (trace_key, start_ns, span_id);
CREATE INDEX span_call_by_parent ON public.span USING btree (trace_key, parent_id) WHERE ((kind)::text = 'chat'::text);
CREATE INDEX trace_body_by_body ON public.trace_body USING btree (body_key, trace_key);
CREATE INDEX trace_by_age ON public.trace USING btree (stored_at);
CREATE INDEX trace_by_episode ON public.trace USING btree (project, episode_id) WHERE (episode_id IS NOT NULL);
CREATE INDEX trace_by_failure ON public.trace USING btree (project, failure, key);
CREATE INDEX trace_by_pool ON public.trace USING btree (project, pool, split, reward);
CREATE INDEX trace_by_project ON public.trace USING btree (project, key);
CREATE INDEX trace_by_session ON public.trace USING btree (project, session, key);
CREATE INDEX trace_by_source ON public.trace USING btree (source);
CREATE INDEX trace_by_stage ON public.trace USING btree (project, stage, n);
CREATE UNIQUE INDEX trace_of_episode ON public.trace USING btree (project, episode_id) WHERE (stage IS NOT NULL);
CREATE INDEX verdict_by_trace ON public.verdict USING btree (trace_key, key);
